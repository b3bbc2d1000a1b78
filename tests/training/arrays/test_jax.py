"""The adapter for JAX, on ranks that are threads; with real processes its example is run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradlane
from tests.training.model.held_core import HeldCore
from tests.training.model.ranks import run_ranks

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
adapter: Any = pytest.importorskip("gradlane.jax")


def layered(params: Any, points: Any) -> Any:
    hidden = points
    for name in ("layer2", "layer10", "layer1"):
        hidden = jax.jit(jnp.tanh)(hidden @ params[name]["w"] + params[name]["b"])
    return jax.checkpoint(lambda head, rows: rows @ head)(params["a_head"], hidden)


def some_params() -> Any:
    layers = {
        name: {"w": jnp.ones((3, 3)), "b": jnp.zeros(3)} for name in ("layer1", "layer2", "layer10")
    }
    return {**layers, "a_head": jnp.ones((3, 1)), "b_unused": jnp.zeros(2)}


def test_the_order_of_layers_is_that_of_their_use() -> None:
    params = some_params()
    names = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    order = adapter.forward_order(layered, params, jnp.ones((2, 3)))
    used = list(dict.fromkeys(names[number] for number in order))
    assert used == ["layer2", "layer10", "layer1", "a_head", "b_unused"]


def test_the_order_inside_of_loops() -> None:
    def looped(params: Any, points: Any) -> Any:
        def body(carried: Any, _: Any) -> Any:
            return jnp.tanh(carried @ params["z_first"]) @ params["a_second"], None

        return jax.lax.scan(body, points, None, length=2)[0]

    params = {"a_second": jnp.ones((3, 3)), "z_first": jnp.ones((3, 3))}
    assert adapter.forward_order(looped, params, jnp.ones((2, 3))) == [1, 0]


def test_means_are_new_arrays_and_what_was_pushed_may_be_donated() -> None:
    def body(session: gradlane.Session) -> Any:
        params = {
            "w": jnp.full((2, 3), float(session.rank)),
            "h": jnp.full(5, 2.0 + session.rank, jnp.bfloat16),
        }
        mean = adapter.MeanOverRanks(session, params)
        spread = mean.spread(params)
        eaten = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
        kept = []
        for step in range(1, 4):
            gradients = jax.tree.map(lambda leaf: leaf * step, params)  # noqa: B023
            mean.push(gradients)
            eaten(gradients)
            kept.append(mean.wait())
        again = eaten(jax.tree.map(jnp.copy, kept[0]))
        return jax.tree.map(np.asarray, {"spread": spread, "kept": kept, "again": again})

    for found in run_ranks(2, body, summary=False):
        assert found["spread"]["w"].tolist() == [[0.0] * 3] * 2
        for step, kept in enumerate(found["kept"], 1):
            assert kept["w"].tolist() == [[0.5 * step] * 3] * 2
            assert kept["h"].astype(np.float32).tolist() == [2.5 * step] * 5
        assert found["again"]["w"].tolist() == [[1.5] * 3] * 2


def test_means_arrive_in_the_order_of_the_forward_pass() -> None:
    def body(session: gradlane.Session) -> list[int]:
        params = some_params()
        order: list[int] = adapter.forward_order(layered, params, jnp.ones((2, 3)))
        mean = adapter.MeanOverRanks(session, params, order=order, prefix="model.")
        mean.push(params)
        assert [number for number, _ in mean.arriving()] == order
        return order

    core = HeldCore()
    assert len(run_ranks(2, body, core=core, summary=False)) == 2
    assert core.channels[0].tensors[0]["name"].startswith("model.layer2.")


def test_what_cannot_be_averaged_is_refused() -> None:
    def body(session: gradlane.Session) -> list[str]:
        params = {"w": jnp.ones(3)}
        mean = adapter.MeanOverRanks(session, params)
        gone = {"w": jnp.ones(3)}
        gone["w"].delete()
        said = []
        for call, gradients in (
            (jax.jit(mean), params),
            (mean, gone),
            (mean, {"v": jnp.ones(3)}),
            (mean, {"w": jnp.ones(4)}),
            (mean, {"w": jnp.ones(3, jnp.float16)}),
        ):
            with pytest.raises(gradlane.GradlaneError) as refusal:
                call(gradients)
            said.append(str(refusal.value))
        assert mean({"w": jnp.full(3, 4.0)})["w"].tolist() == [4.0] * 3
        return said

    for said in run_ranks(2, body, summary=False):
        assert "is a tracer" in said[0] and "outside of jax.jit" in said[0]
        assert "donated" in said[1]
        assert "structure" in said[2]
        assert "shape (4,)" in said[3]
        assert "float16" in said[4]


def test_an_order_that_is_none_is_refused() -> None:
    def body(session: gradlane.Session) -> None:
        with pytest.raises(ValueError, match="each of the 1 leaves"):
            adapter.MeanOverRanks(session, {"w": jnp.ones(3)}, order=[1])

    run_ranks(1, body, summary=False)
