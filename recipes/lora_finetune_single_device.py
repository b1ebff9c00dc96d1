"""LoRA, DoRA or QLoRA of one decoder-only language model on one device: an adapter is trained.

Five buffers make the memory peak; each is decided by a line marked [mem]:

    weights       2P bytes, or 0.52P; 4A       dtype, quantize_base, resident_layers, adapter.rank
    gradients     4A, or one block's           optimizer_in_bwd
    optimizer     8A (AdamW)                   optimizer, optimizer_state
    activations   one block input a block      enable_activation_checkpointing, ..._offloading
    logits        one chunk of target rows     loss.chunk_tokens

P parameters in the base (bf16), A in the adapter (fp32). What decides the arithmetic says [num].

Run:     tune run lora_finetune_single_device --config smollm2/135M_lora_single_device \
             checkpoint_dir=models/SmolLM2-135M dataset=chats.jsonl
Change:  tune cp lora_finetune_single_device mine.py, edit it, then tune run mine.py --config ...

Shapes: B rows of a micro-batch, S tokens a row, D width, M segments a row.
"""

import math
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from solotune.adapters import adapter_lines, check_no_new_tokens, quantize_linears
from solotune.checkpoint import Checkpointer, add_adapter, resume_lines, stored_four_bit
from solotune.config import Component, origin, resolved_yaml, run_recipe
from solotune.data import Batch, Loader, accumulation_groups, make_loader, split_validation
from solotune.memory import (
    LAYER_MAJOR_FACT,
    MEMORY_KEYS,
    Disk,
    HostMemory,
    MemoryReport,
    Stepper,
    StreamedLayers,
    check_memory_keys,
    checkpoint_blocks,
    compile_blocks,
    is_layer_major,
    layer_major_step,
    offload_activations,
    register_steps,
    state_home,
    step_in_backward,
)
from solotune.models import Decoder
from solotune.optim import decay_groups
from solotune.plan import plan_run
from solotune.training import (
    Progress,
    RunLog,
    UpdateGauge,
    autocast_to_bf16,
    check_finite,
    check_positive,
    check_validation,
    check_weights,
    clip_grad_norm,
    constant,
    is_due,
    parameter_lines,
    pick_device,
    pick_dtype,
    pick_output_dir,
    set_dtype,
    set_lr,
    set_seed,
    step_lines,
    stop_on_signals,
)


@dataclass(kw_only=True)
class Config:
    """Every key that the YAML may hold, with its unit and default."""

    # what to train, on what
    model: Component  # solotune.models.auto reads config.json of checkpoint_dir
    tokenizer: Component  # its max_seq_len is the length of a pack, in tokens
    dataset: Component  # or the path of a file: its format is detected
    dataset_val: Component | None = None  # null: val_fraction of the data set
    val_fraction: float = 0.05  # of the rows, at most 256 of them; 0 trains on all
    adapter: Component  # of solotune.adapters.LoRA: rank, alpha, targets, dropout, dora, ...
    checkpoint_dir: str  # a Hugging Face folder, or the folder of an earlier full fine-tuning
    output_dir: str | None = None  # null: ./runs/<config>-<time>
    overwrite: bool = False  # delete an earlier run in output_dir, once this one can begin
    resume_from_checkpoint: bool | str = False  # True: output_dir's newest; or a step or run folder

    # memory
    device: str = "auto"  # auto: cuda, xpu, mps, cpu, the first that is there
    dtype: Literal["bf16", "fp32"] = "bf16"  # of the base's matrices; the rest of it is fp32
    quantize_base: Literal["nf4"] | None = None  # nf4: the blocks' matrices in 4 bits (QLoRA)
    autocast: bool = False  # fp32 weights, products and activations in bf16
    enable_activation_checkpointing: bool = True  # keep block inputs, compute the rest again
    ac_mode: Literal["full", "selective"] = "full"  # which blocks, or what of them: ac_option
    ac_option: int | Literal["op"] | None = None  # selective: every k-th block; op: keep attention
    enable_activation_offloading: bool = False  # what blocks keep waits for backward elsewhere
    activation_offload_to: Literal["host", "disk"] = "host"  # disk: files in output_dir
    compile: bool = False  # torch.compile, one block at a time
    optimizer_in_bwd: bool = False  # step inside backward: one block's gradients are alive
    optimizer_state: Literal["device", "host", "disk"] = "device"  # where it is between steps
    resident_layers: int | None = None  # blocks that stay on the device, others stream; null: all
    plan: bool = True  # say what the run needs, and refuse one that cannot fit, before weights
    log_memory: bool = False  # what the peak is made of, and memory.png; tracked steps are slow

    # optimization
    optimizer: Component
    lr_scheduler: Component | None = None  # null: constant
    loss: Component
    epochs: int = 2
    max_steps_per_epoch: int | None = None  # optimizer steps
    batch_size: int = 1  # rows of one micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches of one optimizer step
    clip_grad_norm: float | None = 1.0  # global L2 norm; null: no clipping
    on_nonfinite: Literal["stop", "skip"] = "stop"  # at a loss or norm of NaN or inf
    shuffle: bool = True
    seed: int = 42
    deterministic: bool = False  # refuse kernels whose sums have no fixed order

    # what the run leaves behind
    log_every_n_steps: int = 1  # optimizer steps
    run_val_every_n_steps: int | None = None  # optimizer steps; null: at the end of each epoch
    save_every_n_steps: int | None = None  # optimizer steps; null: at the end of each epoch
    early_stopping_patience: int | None = None  # validations in a row that were not better
    keep_last_n_checkpoints: int = 2  # step folders; the best one is kept besides
    metric_logger: Component | None = None  # beside metrics.jsonl, which is always written
    profiler: Component | None = None  # solotune.training.StepProfiler: a trace of a few steps


def validate(cfg: Config) -> None:
    """Refuse what would be wrong or silently useless; each message names the key to change."""
    check_positive(
        cfg,
        "epochs batch_size gradient_accumulation_steps max_steps_per_epoch clip_grad_norm "
        "log_every_n_steps run_val_every_n_steps save_every_n_steps early_stopping_patience "
        "keep_last_n_checkpoints",
    )
    check_memory_keys(memory_keys(cfg))
    check_validation(cfg.val_fraction, cfg.dataset_val, patience=cfg.early_stopping_patience)


def memory_keys(cfg: Config) -> dict[str, object]:
    """Return the values of the keys that decide the peak."""
    return {key: getattr(cfg, key) for key in MEMORY_KEYS}


def layer_major(cfg: Config) -> bool:
    """Whether all micro-batches go through one block before the next."""
    return is_layer_major(memory_keys(cfg))


def setup_model(cfg: Config, folder: Path, dtype: torch.dtype) -> Decoder:
    """Build on meta, where nothing has memory yet, and set the memory features."""
    with torch.device("meta"):
        model = cfg.model.build(checkpoint_dir=folder)
    set_dtype(model, dtype)  # [mem] weights  [num] one-dimensional parameters stay fp32
    quantize_linears(model, cfg.quantize_base, stored=stored_four_bit(folder))  # [mem] [num]
    add_adapter(model, cfg.adapter.build())  # [mem] gradients, optimizer state: the adapter's
    if cfg.enable_activation_checkpointing and not layer_major(cfg):  # which recomputes by itself
        checkpoint_blocks(model, option=cfg.ac_option)  # [mem] activations: recompute the rest
    if cfg.compile:
        compile_blocks(model)  # [mem] temporaries; the recomputation is inside the compiled block
    return model.train()


def setup_host(cfg: Config, model: Decoder, device: torch.device, output_dir: Path) -> HostMemory:
    """Return the host side of the run: where activations and weights wait that leave the device."""
    disk = Disk(output_dir) if cfg.activation_offload_to == "disk" else None
    layers = StreamedLayers(model, resident=cfg.resident_layers)  # [mem] weights
    return HostMemory(device, activations=disk, weights=layers)


def setup_optimizer(cfg: Config, model: Decoder, host: HostMemory, output_dir: Path) -> Stepper:
    """Build the optimizer over the adapter and say where its state lives and when it steps."""
    optimizer = cfg.optimizer.build(decay_groups(model))  # [num] magnitudes are not decayed
    # [mem] optimizer state: elsewhere it is on the device only while it steps
    home = state_home(optimizer, cfg.optimizer_state, host=host, output_dir=output_dir)
    stepper = Stepper(optimizer, home)
    if cfg.optimizer_in_bwd and not layer_major(cfg):
        register_steps(model, stepper)  # [mem] gradients
    return stepper


def setup_data(cfg: Config, tokenizer, model: Decoder) -> tuple[Loader, Loader | None, list[str]]:
    """Return the loaders of training and validation data, and the facts to print about them."""
    check_no_new_tokens(tokenizer)  # which an adapter cannot train
    samples = cfg.dataset.build(tokenizer)
    samples_val = cfg.dataset_val.build(tokenizer) if cfg.dataset_val else None
    facts = samples.lines()
    if samples_val is not None:
        facts += [f"validation {line}" for line in samples_val.lines()]
    elif cfg.val_fraction > 0:
        samples, samples_val = split_validation(samples, fraction=cfg.val_fraction)
        facts.append(f"validation: {len(samples_val)} samples held out (val_fraction)")
    sizes = {"batch_size": cfg.batch_size, "max_seq_len": tokenizer.max_seq_len, "seed": cfg.seed}
    sizes["vocab_size"] = len(model.output_weight)
    loader = make_loader(samples, shuffle=cfg.shuffle, **sizes)
    loader_val = make_loader(samples_val, shuffle=False, **sizes) if samples_val else None
    return loader, loader_val, facts + loader.warnings(model.config)


def forward(
    cfg: Config,
    model: Decoder,
    loss_fn: nn.Module,
    batch: Batch,
    num_targets: int,
    host: HostMemory,
) -> tuple[Tensor, Tensor]:
    """Return the embedded tokens, whose gradient is wanted, and the micro-batch's share of loss."""
    x_BSD = model.embed(batch.tokens_BS)  # [num] outside autograd: its gradient is added last
    x_BSD.requires_grad_(model.trains_embedding)
    context = model.context(batch.positions_BS, batch.segments_BM, key=batch.key)  # [num] dropout
    around_block = nullcontext
    if cfg.enable_activation_offloading:  # [mem] activations: what blocks keep leaves the device
        keep = (*model.parameters(), *context.tensors(), x_BSD)
        around_block = offload_activations(host, keep=keep)
    hidden_BSD = model.hidden_states(x_BSD, context, around_block=around_block)
    # [mem] logits: one chunk at a time  [num] fp32 softmax
    return x_BSD, loss_fn(hidden_BSD, model.head, batch, num_targets)


def train_step(
    cfg: Config,
    model: Decoder,
    loss_fn: nn.Module,
    stepper: Stepper,
    group: list[Batch],
    host: HostMemory,
) -> tuple[float, float | None]:
    """One optimizer step over a group of micro-batches; weights stay if a number is not finite.

    Returns the mean loss over the targets and the gradient norm before clipping (None where
    gradients never exist together). The device is read once, before the step.
    """
    group = [batch.to(model.device) for batch in group]
    num_targets = sum(batch.num_targets for batch in group)  # [num] exact shares, known beforehand
    if layer_major(cfg):  # [mem] gradients: one block's; block inputs wait on the host
        clip = cfg.clip_grad_norm  # [num] exact: gradients are parked on the host for the norm
        return layer_major_step(model, loss_fn, stepper, group, num_targets, clip=clip, host=host)
    if cfg.optimizer_in_bwd:  # [mem] gradients: one parameter's, and the embedding's
        x_BSD, loss = forward(cfg, model, loss_fn, group[0], num_targets, host)
        return step_in_backward(model, stepper, group[0], x_BSD, loss, host=host), None

    mean_loss = torch.zeros((), device=model.device)
    embedded = []
    for batch in group:
        x_BSD, loss = forward(cfg, model, loss_fn, batch, num_targets, host)
        loss.backward()  # [mem] gradients
        mean_loss += loss.detach()
        embedded.append((batch.tokens_BS, x_BSD.grad))
    model.add_embedding_gradient(embedded)  # [num] once, in micro-batch order
    norm = clip_grad_norm(model.parameters(), cfg.clip_grad_norm)  # [num] in fp32
    loss, grad_norm = host.read(mean_loss, norm)
    if num_targets and math.isfinite(loss) and math.isfinite(grad_norm):
        stepper.step(model.parameters())  # [mem] optimizer state is made at the first step
    stepper.optimizer.zero_grad(set_to_none=True)  # [mem] gradients end here
    return loss, grad_norm


@torch.no_grad()
def evaluate(model: Decoder, loss_fn: nn.Module, loader: Loader, host: HostMemory) -> float:
    """Return the mean loss over all targets; generators and data order stay untouched."""
    total = torch.zeros((), device=model.device)
    for batch in loader.epoch(0):
        batch = batch.to(model.device)
        context = model.context(batch.positions_BS, batch.segments_BM)
        x_BSD, visit = model.embed(batch.tokens_BS), host.visits(model.blocks)  # [mem] weights
        hidden_BSD = model.hidden_states(x_BSD, context, around_block=visit)
        total += loss_fn(hidden_BSD, model.head, batch, loader.num_targets)
    return host.read(total)[0]


def main(cfg: Config) -> int:
    """Everything in the order in which it happens; return the exit code."""
    validate(cfg)
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)
    autocast = autocast_to_bf16(device, dtype=dtype, enabled=cfg.autocast)  # [num]
    set_seed(cfg.seed, deterministic=cfg.deterministic)
    resume = cfg.resume_from_checkpoint
    output_dir = pick_output_dir(
        cfg.output_dir, config=origin(cfg).config, resume=resume, overwrite=cfg.overwrite
    )
    checkpoint = Checkpointer(cfg.checkpoint_dir, output_dir, keep_last=cfg.keep_last_n_checkpoints)
    resumed_from = checkpoint.find_resume(resume)

    model = setup_model(cfg, checkpoint.checkpoint_dir, dtype)
    tokenizer = cfg.tokenizer.build(checkpoint_dir=checkpoint.checkpoint_dir)
    loader, loader_val, data_facts = setup_data(cfg, tokenizer, model)
    plan = plan_run(globals(), cfg, device, loader, folder=checkpoint.checkpoint_dir)
    accumulation = cfg.gradient_accumulation_steps
    all_steps = math.ceil(len(loader) / accumulation)
    steps_per_epoch = min(all_steps, cfg.max_steps_per_epoch or all_steps)
    total_steps = cfg.epochs * steps_per_epoch
    lr_factor = cfg.lr_scheduler.build(total_steps) if cfg.lr_scheduler else constant(total_steps)
    loss_fn = cfg.loss.build(soft_cap=model.logit_soft_cap)
    logger = cfg.metric_logger.build() if cfg.metric_logger else None
    profiler = cfg.profiler.build() if cfg.profiler else None

    host = setup_host(cfg, model, device, output_dir)
    loaded = checkpoint.load_weights(model, device=device, on_host=host.weights)  # [mem] weights
    lora = checkpoint.fill_adapter(model, cfg.adapter.build(), seed=cfg.seed, resume=resumed_from)
    stepper = setup_optimizer(cfg, model, host, output_dir)
    optimizer = stepper.optimizer
    data = f"{loader.fingerprint()} x{accumulation}"
    progress = Progress(data=data)
    if resumed_from:
        restored = checkpoint.load_training_state(resumed_from, model, optimizer, keep=stepper.keep)
        progress = Progress(**restored)
        progress.check_data(data)

    log = RunLog(
        output_dir,
        replace=not resume,  # not earlier: what stops a run before here costs nothing
        config_yaml=resolved_yaml(cfg),
        device=device,
        first_step=progress.step,
        every=cfg.log_every_n_steps,
        logger=logger,
        profiler=profiler,
        plan=plan,
    )
    log.write_run(data=progress.data)
    log.facts(
        *([LAYER_MAJOR_FACT] if layer_major(cfg) else []),
        *resume_lines(resume, resumed_from, device),
        *loaded.lines(),
        *parameter_lines(model),
        *adapter_lines(model, lora, of=loaded.num_parameters),
        *data_facts,
        *step_lines(loader, accumulation, cfg.epochs, steps_per_epoch, progress.step),
    )

    def validate_on(batches: Loader) -> float:
        with log.uncounted(), autocast:
            val_loss = evaluate(model, loss_fn, batches, host)
        progress.count_validation(val_loss)
        log.facts(f"step {progress.step}: validation loss {val_loss:.4f}")
        log.write({"step": progress.step, "val_loss": val_loss})
        return val_loss

    def save(*, best: bool) -> None:
        with log.uncounted():
            stepper.settle()
            host.settle()
            check_weights(progress.step, model)
            kept = {"model": model, "optimizer": optimizer, "dtype": dtype, "tokenizer": tokenizer}
            kept |= {"adapter": lora, "progress": progress.to_dict()}
            folder = checkpoint.save(progress.step, best=best, **kept)
        log.facts(f"step {progress.step}: saved {folder}{' (best)' if best else ''}")

    memory = MemoryReport(
        model, loss_fn=loss_fn, stepper=stepper, host=host, log=log, on=memory_keys(cfg), plan=plan
    )
    gauge = UpdateGauge(model, stepper)
    running = log.running(total_steps, first_step=progress.step)
    with stop_on_signals() as stop, closing(stepper), running:
        if loader_val and progress.step == 0:
            validate_on(loader_val)
        for epoch in range(progress.epoch, cfg.epochs):
            progress.start_epoch(epoch)
            batches = loader.epoch(epoch, start=progress.batch)
            steps_left = max(0, steps_per_epoch - math.ceil(progress.batch / accumulation))
            if progress.is_over(cfg.early_stopping_patience):
                break
            for group in islice(accumulation_groups(batches, accumulation), steps_left):
                lr = set_lr(optimizer, lr_factor(progress.step + 1))
                with memory.step(progress.step + 1, group), gauge.watching(), autocast:
                    loss, grad_norm = train_step(cfg, model, loss_fn, stepper, group, host)
                progress.advance(group)
                step, steps_left, best = progress.step, steps_left - 1, False
                log.facts(*stepper.news(), *gauge.lines())
                metrics = {"epoch": epoch, "loss": loss, "lr": lr, "grad_norm": grad_norm}
                log.step(step, group, **metrics, updates_lost=gauge.lost)
                check_finite(step, loss, grad_norm, on_nonfinite=cfg.on_nonfinite)
                save_due = is_due(step, cfg.save_every_n_steps, epoch_ends=not steps_left)
                save_due |= step == total_steps or log.save_is_wanted()
                val_due = is_due(step, cfg.run_val_every_n_steps, epoch_ends=not steps_left)
                if loader_val and (val_due or save_due):
                    val_loss = validate_on(loader_val)
                    save_due |= progress.is_over(cfg.early_stopping_patience)
                    best = save_due and progress.improves(val_loss)
                if save_due or stop:
                    save(best=best)
                if progress.is_over(cfg.early_stopping_patience):
                    log.facts(f"step {step}: stopped early, see early_stopping_patience")
                    break
                if stop and step < total_steps:
                    again = origin(cfg).command([f"resume_from_checkpoint={output_dir}"])
                    log.facts(f"stopped by {stop.signal_name}; go on with: {again}")
                    return stop.exit_code
    print(checkpoint.finish())
    return 0


if __name__ == "__main__":
    run_recipe(main, Config)
