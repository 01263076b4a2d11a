"""Choice of implementation, and the argument checks that all operators share."""

import logging

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.checks import bind_dims
from pallas_kernels.dispatch import Op, run
from pallas_kernels.registry import OPS
from pallas_kernels.settings import IMPLEMENTATIONS, KernelSettings, using


def _refuse(*_args: object, **_kwargs: object) -> None:
    raise NotImplementedError("needs an H200")


def _op(name: str = "test_op", **implementations: object) -> Op:
    return Op(name=name, implementations=implementations)


def test_every_operator_has_a_reference_and_a_portable_implementation():
    assert len({op.name for op in OPS}) == len(OPS)
    for op in OPS:
        assert {"reference", "xla"} <= set(op.implementations) <= set(IMPLEMENTATIONS), op.name


def test_automatic_choice_prefers_kernels_and_passes_over_refusals():
    op = _op(reference=lambda: "reference", xla=lambda: "xla", mosaic=lambda: "mosaic")
    assert run(op, None) == "mosaic"
    assert run(_op(xla=lambda: "xla", mosaic=_refuse), None) == "xla"


def test_only_an_automatic_choice_passes_over_what_is_unproven():
    op = Op(
        name="test_op",
        implementations={"xla": lambda x: ("xla", x), "mosaic": lambda x: ("mosaic", x)},
        unproven={"mosaic": lambda x: "slow above 2" if x > 2 else None},
    )
    assert [run(op, None, x) for x in (2, 3)] == [("mosaic", 2), ("xla", 3)]
    assert run(op, "mosaic", 3) == ("mosaic", 3)


def test_named_choice_runs_exactly_that_implementation():
    op = _op(reference=lambda x: ("reference", x), xla=lambda x: ("xla", x))
    assert run(op, "reference", 3) == ("reference", 3)
    assert run(op, "xla", 3) == ("xla", 3)


def test_settings_name_the_implementation_of_operators_that_have_it():
    both = _op(reference=lambda: "reference", xla=lambda: "xla", mosaic=lambda: "mosaic")
    refusing = _op(xla=lambda: "xla", mosaic=_refuse)
    without = _op(reference=lambda: "reference", xla=lambda: "xla")
    with using(KernelSettings(implementation="mosaic")):
        assert [run(both, None), run(without, None), run(both, "xla")] == ["mosaic", "xla", "xla"]
        with pytest.raises(NotImplementedError, match="mosaic: needs an H200"):
            run(refusing, None)
    assert run(refusing, None) == "xla"


def test_automatic_choice_is_logged_once_with_its_reason(caplog):
    dispatch._log_choice.cache_clear()
    op = _op(name="logged_op", xla=lambda: "xla", mosaic=_refuse)
    with caplog.at_level(logging.INFO):
        run(op, None)
        run(op, None)
    (record,) = caplog.records
    assert "op=logged_op implementation=xla" in record.getMessage()
    assert "mosaic: needs an H200; triton: not registered" in record.getMessage()


def test_unknown_and_unregistered_names_are_errors():
    op = _op(reference=lambda: 0, xla=lambda: 0)
    with pytest.raises(ValueError, match=r"unknown: got 'cuda'; .*\['reference', 'xla'\]"):
        run(op, "cuda")
    with pytest.raises(ValueError, match=r"not registered .*: got 'mosaic'"):
        run(op, "mosaic")


@pytest.mark.parametrize("implementation", ["mosaic", None])
def test_a_refusal_with_nothing_left_is_an_error_with_every_reason(implementation):
    op = _op(mosaic=_refuse, reference=lambda: 0)
    with pytest.raises(NotImplementedError, match="mosaic: needs an H200"):
        run(op, implementation)


def test_an_implementation_name_outside_the_table_cannot_be_registered():
    with pytest.raises(ValueError, match=r"\['mosiac'\]"):
        _op(mosiac=_refuse)


def test_dims_are_read_from_the_suffix_of_names():
    shape = jax.ShapeDtypeStruct
    dims = bind_dims(
        "f", q_TNDk=shape((5, 2, 16), jnp.float32), w13_ZE2FL=shape((3, 4, 2, 6, 7), jnp.float32)
    )
    assert dims == {"T": 5, "N": 2, "Dk": 16, "Z": 3, "E": 4, "F": 6, "L": 7}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q_TN": (5, 2), "k_TN": (5, 3)}, r"shape of k_TN .* N=3; expected N=2 as in q_TN"),
        ({"q_TN": (5, 2, 1)}, r"rank of q_TN .*expected the 2 dims \[T, N\]"),
        ({"w_E2": (4, 3)}, r"shape of w_E2 .* 2=3; expected"),
    ],
)
def test_disagreeing_shapes_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        bind_dims("f", **{name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()})
