"""Random settings are accepted as given or refused with a one-line error."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from pyh2o import Llama
from pyh2o.cache.settings import Budget, EvictionSettings
from pyh2o.errors import PyH2OError
from pyh2o.policies import POLICIES, parse_policy
from pyh2o.writing.sampling import Sampling
from tiny_llama import tiny_llama
from tries import Tries, or_refusal, refused

Numbers = st.one_of(
    st.integers(-2, 300),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 10**30, -(2**31)]),
    st.floats(0, 1),
    st.floats(),
)
Odd = st.one_of(Numbers, st.sampled_from([None, True, "", "5", "h2o", "q8_0", [], (1,), b"x"]))
Policies = st.lists(
    st.sampled_from([*POLICIES, ":", ",", "=", "queries", "pool", "decay", "1", "32", "0.9", "-1",
                     "nan", "1e400", " ", "é", "\n", "9" * 30]),
    min_size=1, max_size=8,
).map("".join)  # fmt: skip
MODEL: dict[str, Any] = {"seed": 3, "n_layer": 1}


def test_eviction_settings_are_kept_or_refused(tries: Tries) -> None:
    names = [each.name for each in fields(EvictionSettings)]
    given = st.dictionaries(
        st.sampled_from(names), Odd | Policies | st.sampled_from(["exact", "auto", "f16"])
    )
    asked = st.tuples(given, st.integers(-5, 5000), st.integers(0, 5000))

    def make_sense(drawn: tuple[dict[str, Any], int, int]) -> None:
        given, window, n_pos = drawn
        settings = or_refusal(lambda: EvictionSettings(**given))
        budget: Budget | None = settings and or_refusal(lambda: settings.resolve(window, n_pos))
        if budget is None:
            return
        assert budget.recent >= 1
        assert min(budget.heavy, budget.pinned, budget.recall) >= 0
        assert budget.slack >= 1
        assert budget.rows <= window
        assert budget.capacity <= n_pos
        assert budget.cells >= budget.capacity
        assert parse_policy(str(budget.policy)) == budget.policy
        str(budget.policy).encode()
        json.dumps(budget.saved(), allow_nan=False)

    tries.every(asked, make_sense, examples=300)


def test_sampling_settings_are_kept_or_refused(tries: Tries) -> None:
    given = st.dictionaries(st.sampled_from([each.name for each in fields(Sampling)]), Odd)

    def is_valid_json(given: dict[str, Any]) -> None:
        sampling = or_refusal(lambda: Sampling(**given))
        if sampling is not None:
            saved = json.loads(json.dumps(asdict(sampling), allow_nan=False))
            assert Sampling(**saved) == sampling

    tries.every(given, is_valid_json, examples=300)


@pytest.mark.filterwarnings("ignore:embedding=True")
def test_arguments_never_end_the_process(path: Path, tries: Tries) -> None:
    """A model loaded with them reads and generates, and llama.cpp does not abort."""
    small = st.integers(-2, 70)
    values = {
        "n_ctx": st.integers(-2, 600), "hh": small | st.floats(0, 1), "recent": small,
        "slack": small, "pinned": small, "n_batch": small, "n_ubatch": small,
        "recall": small | st.floats(0, 0.3),
        "prefill": st.sampled_from(["stream", "exact", "x"]), "prefill_mib": small,
        "recall_mib": small,
        "attention": st.sampled_from(["auto", "ops", "portable", "neon"]),
        "type_k": st.integers(-1, 32) | Odd, "type_v": st.integers(-1, 32) | Odd,
        "rope_freq_base": Odd, "rope_freq_scale": Odd, "yarn_ext_factor": Odd,
        "rope_scaling_type": st.integers(-1, 3), "evict": st.booleans(), "policy": Policies,
        "logits_all": st.booleans(), "offload_kqv": st.booleans(), "flash_attn": st.booleans(),
        "n_thread": small, "last_n_tokens_size": st.integers(0, 70), "embedding": st.booleans(),
    }  # fmt: skip
    names = st.sets(st.sampled_from(sorted(values)), max_size=5)
    given = names.flatmap(lambda some: st.fixed_dictionaries({name: values[name] for name in some}))

    def loads(given: dict[str, Any]) -> None:
        llm: Llama | None = or_refusal(lambda: tiny_llama(path, **{"n_ctx": 128, **given}))
        if llm is None:
            return
        with llm:
            if given.get("embedding"):
                return
            try:
                llm.eval(list(range(3, 60)))
            except PyH2OError as error:
                refused(error)
                return
            assert llm.kv.position == 57
            assert llm.kv.used <= llm.kv.capacity

    tries.every(given, loads, examples=40)
