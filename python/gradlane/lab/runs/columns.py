"""What tables of the lab's rows show, in this order: pages, and files for spreadsheets."""

from __future__ import annotations

ROW_COLUMNS = (
    "source",
    "workload",
    "strategy",
    "repeat",
    "workers",
    "rate_bps",
    "dilation",
    "slice_elems",
    "codec",
    "steps",
    "samples_per_s",
    "step_s_median",
    "wall_step_s_median",
    "compute_s",
    "bound_step_s",
    "step_over_bound",
    "tx_bytes_per_step",
    "link_utilization",
    "cpu_s_per_step",
    "cpu_share",
    "stolen_share",
    "cpu_bound",
    "params_equal",
    "param_digest",
    "peer_version",
)
"""Fields of rows; where no row has one, it is left out."""
