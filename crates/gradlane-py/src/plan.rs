//! `plan_json`: the plan of a model from its tensor table; `codec_json`: what a codec does to a
//! tensor.

use gradlane_engine::{
    CodecSizes, Plan, RingBytes, Roles, Scheme, StragglerPolicy, Strategy, Synchrony,
    TensorSetting, TensorSpec, Update,
};
use gradlane_net::TensorCodec;
use gradlane_units::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Deserialize;

/// A row of the tensor table.
#[derive(Deserialize)]
struct Row {
    #[serde(flatten)]
    spec: TensorSpec,
    /// How it is aggregated; none: as the strategy does.
    #[serde(default)]
    scheme: Option<Scheme>,
    /// How it is encoded; none: as it is.
    #[serde(default)]
    codec: Option<String>,
    /// Sizes of its dimensions in the order of its storage, for the codec.
    #[serde(default)]
    sizes: Vec<u64>,
}

#[allow(clippy::needless_pass_by_value, reason = "errors come by value from map_err")]
fn refuse(text: impl ToString) -> PyErr {
    PyValueError::new_err(text.to_string())
}

/// Build a plan and return it as JSON, the same text for the same arguments.
///
/// tensors_json is a list of {"name", "numel", "dtype", "role"}, with "scheme" where it is another one
/// than the strategy's, and {"codec", "sizes"} of those that are to be encoded; update is "worker" or
/// "server". stragglers_json is {"close": {"backup": {"ranks": n}}, {"deadline": {"percent": p}} or "spread",
/// "ahead_steps": k} where a step goes on without those that are late. The first `servers` ranks own
/// slices; None: all do. With `workers` only the first so many ranks train, and those after them only
/// own slices.
#[pyfunction]
#[pyo3(signature = (tensors_json, strategy, slice_elems, seed, update, world_size, *, stragglers_json = None, servers = None, workers = None))]
#[allow(clippy::too_many_arguments, reason = "most have names in Python")]
pub(crate) fn plan_json(
    tensors_json: &str,
    strategy: &str,
    slice_elems: Option<u64>,
    seed: u64,
    update: &str,
    world_size: u32,
    stragglers_json: Option<&str>,
    servers: Option<u32>,
    workers: Option<u32>,
) -> PyResult<String> {
    let rows: Vec<Row> = serde_json::from_str(tensors_json)
        .map_err(|error| refuse(format!("tensor table: {error}")))?;
    let update: Update = serde_json::from_value(update.into()).map_err(|_| {
        refuse(format!("unknown update {update:?}; known are \"worker\" and \"server\""))
    })?;
    let mut strategy = Strategy::named(strategy, slice_elems, seed).map_err(refuse)?;
    if let Some(text) = stragglers_json {
        if strategy.synchrony != Synchrony::Bulk {
            let name = &strategy.name;
            return Err(refuse(format!("in strategy {name:?} nobody waits for stragglers")));
        }
        let rule: StragglerPolicy =
            serde_json::from_str(text).map_err(|error| refuse(format!("stragglers: {error}")))?;
        strategy.synchrony = Synchrony::BackupWorkers(rule);
    }
    let mut tensors = Vec::with_capacity(rows.len());
    for Row { spec, scheme, codec, sizes } in rows {
        let codec = match codec {
            Some(text) => TensorCodec::parse(&text, spec.dtype, &sizes)
                .map_err(|error| refuse(format!("tensor {:?}: {error}", spec.name)))?,
            None => None,
        };
        let codec = codec.map(|codec| -> Box<dyn CodecSizes> { Box::new(codec) });
        tensors.push(TensorSetting { spec, scheme, codec });
    }
    let roles = match (workers, servers) {
        (Some(workers), None) if workers < world_size => {
            Roles::dedicated(workers, world_size - workers)
        }
        (Some(workers), _) if workers != world_size => {
            return Err(refuse(format!(
                "{workers} of {world_size} ranks are to train, and servers is {servers:?}: the ranks \
                 that do not train are the servers"
            )));
        }
        _ => Roles::first(world_size, servers.unwrap_or(world_size)),
    };
    let plan = Plan::build_for(tensors, strategy, update, roles).map_err(refuse)?;
    serde_json::to_string(&plan).map_err(refuse)
}

/// Say what a codec does to a tensor, as a JSON object, or "null" where it would change nothing.
///
/// sizes are those of the tensor's dimensions in the order of its storage. "codec" is the canonical
/// text, "wire_bytes_max" the most bytes of the encoded tensor, and exact with "fixed_size";
/// "wire_bytes_expected" those that its contribution and its mean take on average, half of both; slices
/// begin at multiples of "granule_elems"; "residual_width" numbers are kept for each value (error
/// feedback). With ring_ranks, the bytes are those of a ring of so many ranks: half of what goes round in
/// all laps. ValueError names what is wrong with the text, or why it cannot go round.
#[pyfunction]
#[pyo3(signature = (text, dtype, sizes, ring_ranks=None))]
#[allow(clippy::needless_pass_by_value, reason = "lists become vectors of their own")]
pub(crate) fn codec_json(
    text: &str,
    dtype: &str,
    sizes: Vec<u64>,
    ring_ranks: Option<u32>,
) -> PyResult<String> {
    let dtype: Dtype = serde_json::from_value(dtype.into())
        .map_err(|_| refuse(format!("unknown dtype {dtype:?}")))?;
    let elements = sizes.iter().try_fold(1_u64, |all, &size| all.checked_mul(size));
    let elements = elements.ok_or_else(|| refuse("more than 2^64 elements"))?;
    let Some(codec) = TensorCodec::parse(text, dtype, &sizes).map_err(refuse)? else {
        return Ok("null".to_owned());
    };
    let on_ring = match ring_ranks {
        Some(ranks) if ranks > 1 => codec
            .ring_bytes(elements, ranks)
            .map_err(|why| refuse(format!("codec {:?} on a ring: {why}", codec.name())))?,
        _ => None,
    };
    // A hop of a ring encodes sums: of those no share is known but the largest.
    let of_servers =
        (codec.bytes_expected(elements, false) + codec.bytes_expected(elements, true)) / 2;
    let (bytes, expected) = match (on_ring, ring_ranks) {
        (Some(RingBytes { scales, sums }), _) => {
            (sums + scales.div_ceil(2), sums + scales.div_ceil(2))
        }
        (None, Some(_)) => (codec.bytes_max(elements), codec.bytes_max(elements)),
        (None, None) => (codec.bytes_max(elements), of_servers),
    };
    let facts = serde_json::json!({
        "codec": codec.name(),
        "granule_elems": codec.granule_elems(),
        "fixed_size": codec.is_fixed(),
        "residual_width": codec.residual_width(),
        "unbiased": codec.is_unbiased(),
        "wire_bytes_max": bytes,
        "wire_bytes_expected": expected,
    });
    Ok(facts.to_string())
}
