"""The fastest configuration that fits, among the switches that save memory.

The given configuration is one of them. All that saves is switched on first, and where that does not
fit, what costs another memory (of the host) goes back until it does. Then one switch after another,
the one that costs most time first, goes back as far as what is left still fits. Exact switches come
before coarser optimizer state.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from solotune.config import Component
from solotune.errors import ConfigError
from solotune.memory import is_layer_major
from solotune.plan.budget import MARGIN, Budget
from solotune.plan.device_profile import DeviceProfile
from solotune.plan.needs import Planned

Values = dict[str, Any]  # of config keys

# What a switch costs besides, for people; the time comes from the simulation.
LABELS = {
    "resident_layers": "bit-exact",
    "optimizer_state": "bit-exact",
    "optimizer_in_bwd": "bit-exact; with clipping reordered",
    "enable_activation_checkpointing": "bit-exact",
    "enable_activation_offloading": "bit-exact",
    "activation_offload_to": "bit-exact",
    "ac_mode": "bit-exact",
    "ac_option": "bit-exact",
    "batch_size": "reordered",
    "gradient_accumulation_steps": "reordered",
    "optimizer": "approximate",
}
_OURS = ("solotune.optim.AdamWKahan", "solotune.optim.LionKahan")
_FORMATS = (("int8", "bf16"), ("int8", "int8"), ("none", "int8"))  # of residual and state_dtype


@dataclass
class Candidate:
    """Values of config keys, and what a run with them needs."""

    values: Values  # those that differ from the given ones
    planned: Planned
    excess: float  # how far it is from fitting; 0: it fits
    seconds: float | None  # of a step, where a device is known

    @property
    def fits(self) -> bool:
        return self.excess == 0


@dataclass
class Found:
    """The result of a search."""

    best: Candidate  # or, where nothing fits, the closest
    runner_up: Candidate | None
    without: dict[str, Candidate] = field(default_factory=dict)  # a key as given, the rest as best
    tried: int = 0


class Search:
    """Looks for a configuration within a budget; `plan` simulates a Config, as `given` was."""

    def __init__(
        self,
        cfg: Any,
        *,
        plan: Callable[[Any], Planned],
        validate: Callable[[Any], None],
        budget: Budget,
        profile: DeviceProfile | None,
        given: Planned,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.cfg, self._plan, self._validate = cfg, plan, validate
        self.budget, self.profile, self._given, self._tell = budget, profile, given, tell
        self._known: dict[str, Candidate | None] = {}

    def run(self) -> Found:
        """Return the best configuration; raises ConfigError where the config has no such keys."""
        self._candidate({})
        self._exact({})
        for values in self._coarser():
            if self._fitting():
                break
            self._exact(values)
        known = [c for c in self._known.values() if c is not None]
        if not known:
            raise ConfigError("no combination of the memory keys is valid with this config")
        fitting = self._fitting()
        if not fitting:
            return Found(min(known, key=lambda c: c.excess), None, tried=len(known))
        best, *others = sorted(fitting, key=self._order)
        without = self._without(best)
        return Found(best, others[0] if others else None, without, tried=len(known))

    def _exact(self, fixed: Values) -> None:
        """Try the exact switches with some values given."""
        switches = self._switches()
        levels = {name: len(options) - 1 for name, options in switches.items()}
        levels, closest = self._closest(switches, levels, fixed)
        if closest is None or not closest.fits:
            return
        for name, options in switches.items():
            for level, _ in enumerate(options[: levels[name]]):
                other = self._try(switches, levels | {name: level}, fixed)
                if other is not None and other.fits:
                    levels |= {name: level}
                    break

    def _closest(
        self, switches: Mapping[str, Sequence[Values]], levels: dict[str, int], fixed: Values
    ) -> tuple[dict[str, int], Candidate | None]:
        """Return the levels that come closest to fitting, from some on, and their candidate.

        What saves memory of the device mostly takes that of the host, so each switch may go back.
        """
        names = [n for n in ("optimizer_state", "activations", *switches) if n in switches]
        best, is_better = self._try(switches, levels, fixed), True
        while is_better and (best is None or not best.fits):
            is_better = False
            for name in names:
                for level in dict.fromkeys((max(levels[name] - 1, 0), 0)):
                    lower = levels | {name: level}
                    other = self._try(switches, lower, fixed)
                    if other is None or (best is not None and other.excess >= best.excess):
                        continue
                    best, levels, is_better = other, lower, True
                    if best.fits:
                        return levels, best
        return levels, best

    def _without(self, best: Candidate) -> dict[str, Candidate]:
        """Return what the best would need with one switch as it was given."""
        found = {}
        for options in self._switches().values():
            keys = [key for key in options[0] if key in best.values]
            if not keys:
                continue
            other = self._candidate({k: v for k, v in best.values.items() if k not in keys})
            if other is not None and not other.fits:
                found |= dict.fromkeys(keys, other)
        return found

    def _switches(self) -> dict[str, list[Values]]:
        """Return each switch's values, from the fastest to the one that takes least."""
        cfg, blocks = self.cfg, self._given.simulated.blocks
        rows, total = cfg.batch_size, cfg.batch_size * cfg.gradient_accumulation_steps
        splits = [n for n in range(rows, 0, -1) if rows % n == 0]
        shares = dict.fromkeys((blocks * 3 // 4, blocks // 2, blocks // 4, 0))
        whole = {"ac_mode": "full", "ac_option": None}
        switches: dict[str, list[Values]] = {
            "resident_layers": [
                {"resident_layers": None},
                *({"resident_layers": n} for n in shares if n < blocks),
            ],
            "optimizer_state": [{"optimizer_state": w} for w in ("device", "host", "disk")],
            "checkpointing": [
                {"enable_activation_checkpointing": on} | whole for on in (False, True)
            ],
            "activations": [
                {"enable_activation_offloading": False, "activation_offload_to": "host"},
                {"enable_activation_offloading": True, "activation_offload_to": "host"},
                {"enable_activation_offloading": True, "activation_offload_to": "disk"},
            ],
            "optimizer_in_bwd": [{"optimizer_in_bwd": on} for on in (False, True)],
            "batch": [{"batch_size": n, "gradient_accumulation_steps": total // n} for n in splits],
        }
        keys = {f.name for f in dataclasses.fields(cfg)}
        return {name: o for name, o in switches.items() if keys.issuperset(o[0])}

    def _coarser(self) -> Iterator[Values]:
        """Yield optimizers with fewer bytes of state, the finer first."""
        optimizer: Component = self.cfg.optimizer
        given = optimizer.arguments
        now = None
        if optimizer.path in _OURS:
            now = _bytes_each(given.get("residual", "int16"), given.get("state_dtype", "fp32"))
        else:
            shared = {k: given[k] for k in ("lr", "betas", "weight_decay") if k in given}
            optimizer = dataclasses.replace(optimizer, path=_OURS[0], arguments=shared, written={})
        for residual, state_dtype in _FORMATS if self.cfg.dtype == "bf16" else ():
            if now is None or _bytes_each(residual, state_dtype) < now:
                arguments = {"residual": residual, "state_dtype": state_dtype}
                coarser = optimizer.arguments | arguments
                yield {"optimizer": dataclasses.replace(optimizer, arguments=coarser)}

    def _try(
        self, switches: Mapping[str, Sequence[Values]], levels: Mapping[str, int], fixed: Values
    ) -> Candidate | None:
        """Return the candidate of some levels; None where the recipe refuses it."""
        values = dict(fixed)
        for name, level in levels.items():
            values |= switches[name][level]
        if values.get("optimizer_in_bwd") is False:
            values["resident_layers"] = None
        cfg = changed(self.cfg, values)
        if is_layer_major(vars(cfg)):  # has its own: what has no effect stays as it was
            for name in ("enable_activation_checkpointing", "enable_activation_offloading"):
                values[name] = getattr(self.cfg, name)
        return self._candidate(values)

    def _candidate(self, values: Values) -> Candidate | None:
        """Return what a run with some values needs; None where they are refused."""
        values = {key: value for key, value in values.items() if value != getattr(self.cfg, key)}
        key = repr(sorted(values.items(), key=lambda item: item[0]))
        if key not in self._known:
            cfg = changed(self.cfg, values)
            try:
                self._validate(cfg)
                planned = self._plan(cfg) if values else self._given
            except ConfigError:  # of the recipe, or of the optimizer for such weights
                self._known[key] = None
            else:
                self._known[key] = self._judged(planned, values)
        return self._known[key]

    def _judged(self, planned: Planned, values: Values) -> Candidate:
        excess = self.budget.excess(planned.needs, margin=MARGIN)
        seconds = planned.seconds(self.profile) if self.profile else None
        words = " ".join(overrides(self.cfg, values)) or "as it is"
        faults = self.budget.faults(planned.needs, margin=MARGIN)
        self._tell(f"  {'; '.join(faults) or 'fits'}: {words}")
        return Candidate(values, planned, excess, seconds)

    def _fitting(self) -> list[Candidate]:
        return [c for c in self._known.values() if c is not None and c.fits]

    def _order(self, candidate: Candidate) -> tuple[bool, float, int, int]:
        """Return what sorts candidates: exact ones first, then by time, copies, what changes."""
        is_coarse = "optimizer" in candidate.values
        seconds, needs = candidate.seconds or self._guess(candidate), candidate.planned.needs
        changes = len(list(overrides(self.cfg, candidate.values)))
        return is_coarse, float(f"{seconds:.3g}"), needs.to_device + needs.to_host, changes

    def _guess(self, candidate: Candidate) -> float:
        """Return a time for comparisons without a device: that of a 4090 and its bus."""
        from solotune.plan.device_profile import find_profile

        return candidate.planned.seconds(find_profile("4090"))


def changed(cfg: Any, values: Values) -> Any:
    """Return a Config with other values; it keeps its origin."""
    other = dataclasses.replace(cfg, **values)
    object.__setattr__(other, "_origin", cfg._origin)
    return other


def overrides(cfg: Any, values: Values) -> Iterator[str]:
    """Yield the words that turn a config into one with these values."""
    for key, value in values.items():
        old = getattr(cfg, key)
        if value == old:
            continue
        if not isinstance(value, Component):
            yield f"{key}={value}"
            continue
        if value.path != old.path:
            yield f"{key}={value.path}"
        for name, argument in value.arguments.items():
            if value.path != old.path or old.arguments.get(name) != argument:
                yield f"{key}.{name}={argument}"


def _bytes_each(residual: str, state_dtype: str) -> int:
    """Return the bytes of state a parameter, of two moments: what formats are compared by."""
    moment = {"fp32": 4, "bf16": 2, "int8": 1}[state_dtype]
    return {"int16": 2, "int8": 1, "none": 0}[residual] + 2 * moment
