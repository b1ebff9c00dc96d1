"""What a run needs of device memory, host memory, disk and time, from its simulated steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solotune.plan.device_profile import DeviceProfile
from solotune.plan.simulate import Simulated, Work, simulate

GIB = 2**30

# What no step shows; each is what runs have shown, rounded up.
CONTEXT = GIB // 2  # a card's own: driver, loaded kernels
WORKSPACE = 64 * 2**20  # of matrix products, for the thread of backward and another; Hopper's
PROCESS = {"cuda": 3 * GIB // 2, "cpu": 3 * GIB // 4}  # host memory of Python, torch and libraries


@dataclass(frozen=True)
class Needs:
    """A run's needs in bytes, but for `tokens` and `operations` of a step."""

    kind: str  # of the device: cuda, cpu
    device: dict[str, int]  # by category at the moment of the peak, which is their sum
    phase: str  # of that moment
    reserved: int  # what the allocator takes for it, and the context
    pinned: int
    pageable: int  # all else of the host: the process, state, parked gradients
    host: dict[str, int]  # of the run, without the process, by category
    disk: dict[str, int]  # checkpoints, optimizer state, activations
    disk_read: int  # each step
    disk_written: int
    to_device: int  # over the bus, each step
    to_host: int
    tokens: int
    operations: int
    parameters: int
    trained: int
    state: int  # of the optimizer
    is_upper_bound: bool  # where compiled code holds less

    @property
    def peak(self) -> int:
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        return self.pinned + self.pageable

    @property
    def disk_total(self) -> int:
        return sum(self.disk.values())


def needs_of(recipe: Any, cfg: Any, *, kind: str, folder: Path, work: Work) -> "Planned":
    """Return what a run of a recipe under a config needs, on a device of `kind`.

    `folder` is the model folder, of which config.json alone is read.
    """
    return Planned(simulate(recipe, cfg, kind=kind, work=work, folder=folder), cfg)


class Planned:
    """A simulated config: its needs, and its time on a device."""

    def __init__(self, simulated: Simulated, cfg: Any) -> None:
        self.simulated, self.cfg = simulated, cfg
        self.needs = _needs(simulated, cfg)

    def seconds(self, profile: DeviceProfile) -> float:
        """Return the time of a later step: computing, beside copies and files; the longest of them.

        What a run measures is more where copies wait for computation, or the disk is not idle.
        """
        simulated, needs = self.simulated, self.needs
        fp32 = self.cfg.dtype == "fp32" and not getattr(self.cfg, "autocast", False)
        dtype = "fp32" if fp32 else "bf16"
        computing = simulated.at(lambda step: profile.seconds_of(step.costs, dtype=dtype))
        bus = max(needs.to_device, needs.to_host) / (profile.bus_gb_per_s * 1e9)
        disk = (needs.disk_read + needs.disk_written) / (profile.disk_gb_per_s * 1e9)
        return max(computing, bus, disk)


def _needs(simulated: Simulated, cfg: Any) -> Needs:
    on_card = simulated.kind != "cpu"
    device, host = simulated.peak(lambda s: s.device), simulated.peak(lambda s: s.host)
    disk = simulated.peak(lambda s: s.disk)
    state_in_files = 0 if on_card else disk.by_category["optimizer state"]  # stepped in place
    by_category = dict(device.by_category)
    reserved = simulated.reserved
    pinned, pageable = 0, simulated.most(lambda s: s.together)
    if on_card:
        by_category["workspace"] = WORKSPACE
        reserved += WORKSPACE + CONTEXT
        pinned = int(max(simulated.first.pinned, simulated.at(lambda s: s.pinned)))
        pageable = int(max(simulated.first.pageable, simulated.at(lambda s: s.pageable)))
    return Needs(
        kind=simulated.kind,
        device=by_category,
        phase=device.phase,
        reserved=reserved,
        pinned=pinned,
        pageable=pageable + PROCESS["cuda" if on_card else "cpu"],
        host=host.by_category,
        disk={
            "checkpoints": _checkpoints(simulated, cfg),
            **{name: size for name, size in disk.by_category.items() if size},
        },
        disk_read=int(simulated.at(lambda s: s.disk_read)) + state_in_files,
        disk_written=int(simulated.at(lambda s: s.disk_written)) + state_in_files,
        to_device=int(simulated.at(lambda s: s.to_device)),
        to_host=int(simulated.at(lambda s: s.to_host)),
        tokens=simulated.work.rows * simulated.work.tokens * simulated.micro_batches,
        operations=int(simulated.at(lambda s: s.flops)),
        parameters=simulated.parameters,
        trained=simulated.trained,
        state=simulated.state_bytes,
        is_upper_bound=bool(getattr(cfg, "compile", False)),
    )


def _checkpoints(simulated: Simulated, cfg: Any) -> int:
    """Return the bytes of the step folders that are kept, the best, and one that is being written.

    The newest alone holds the optimizer's state. The run of an adapter saves the adapter.
    """
    has_adapter = getattr(cfg, "adapter", None) is not None
    folder = simulated.trained_bytes if has_adapter else simulated.weight_bytes
    validates = bool(cfg.val_fraction or cfg.dataset_val)
    return (cfg.keep_last_n_checkpoints + validates + 1) * folder + 2 * simulated.state_bytes
