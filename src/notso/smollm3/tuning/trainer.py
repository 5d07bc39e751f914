"""Train LoRA adapters, resumably, with TRL and PEFT. These optional libraries are imported when training starts."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from notso.extras import install_line
from notso.smollm3.errors import ModelError, require
from notso.smollm3.model.lora import MAX_RANK
from notso.smollm3.model.weights import MATRICES
from notso.smollm3.tuning.training_rows import TrainingRow


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of LoRA training of all matrices with AdamW. Raises InvalidRequestError."""

    # The adapter adds (alpha / rank) * B @ A to each matrix.
    rank: int = 16
    alpha: float = 32.0
    learning_rate: float = 2e-4
    # Number of repetitions of each training row.
    epochs: int = 3
    # Number of repetitions of each rehearsal row (an answer of the base model, which serves to preserve its abilities).
    rehearsals: int = 2
    batch_rows: int = 8
    # Rows with more tokens are truncated.
    max_tokens: int = 1024
    # Fraction of rows that are held out for evaluation.
    holdout: float = 0.1
    checkpoint_steps: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("rank", 1, MAX_RANK),
            ("alpha", 1e-3, 1e6),
            ("learning_rate", 1e-7, 1.0),
            ("epochs", 1, 10_000),
            ("rehearsals", 1, 10_000),
            ("batch_rows", 1, 4096),
            ("max_tokens", 16, 131_072),
            ("holdout", 0.0, 0.9),
            ("checkpoint_steps", 1, 1_000_000),
            ("seed", 0, 2**32 - 1),
        ):
            value = getattr(self, name)
            kind, what = (int | float, "a number") if isinstance(least, float) else (int, "a whole number")
            fits = isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most
            require(fits, name, f"{what} from {least:,} to {most:,}")

    def digest(self, *more: bytes) -> str:
        found = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for part in more:
            found.update(hashlib.sha256(part).digest())
        return found.hexdigest()


RUN_FILE, ADAPTER_FOLDER = "run.json", "adapter"
CHECKPOINTS_KEPT = 2
# Base models with more parameters than this use gradient checkpointing and, even without a GPU, bfloat16.
LARGE_PARAMETERS = 1_000_000_000

Progress = Callable[[str, int, int], None]  # activity, steps done, total steps


class TuningError(ModelError):
    """Training cannot start or resume, or it diverged."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Result of training. Losses are in nats per target token."""

    peft_folder: Path  # the adapter in PEFT's format
    steps: int
    resumed_at: int  # step of the checkpoint from which training was resumed; 0 if there was none
    loss: float  # mean over the last 10 steps
    held_out_before: float | None
    held_out_after: float | None


def require_libraries() -> None:
    """Raise TuningError if a library is missing."""
    try:
        import datasets  # noqa: F401
        import peft  # noqa: F401
        import torch  # noqa: F401
        import trl  # noqa: F401
    except ImportError as error:
        raise TuningError(f"tuning requires more packages ({error}): {install_line('tune')}") from None


def run_start_date(folder: Path) -> date | None:
    """Return the date on which a run started, or None."""
    try:
        return date.fromisoformat(json.loads((folder / RUN_FILE).read_text("utf-8"))["day"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def train(
    load_base: Callable[[Any], Any],
    recipe: Recipe,
    learned: Sequence[TrainingRow],
    rehearsed: Sequence[TrainingRow],
    held_out: Sequence[TrainingRow],
    folder: Path,
    digest: str,
    day: date,
    parameters: int,
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> TrainingResult:
    """Train in `folder`, resuming a run with the same `digest`.

    Raises TuningError if the folder contains another run, libraries are missing, or training diverges.
    """
    # load_base: takes a dtype and returns a transformers model.
    require_libraries()
    import torch
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTTrainer

    disable_progress_bars()
    if threads is not None:
        torch.set_num_threads(threads)
    state = _open_run(folder, digest, day, recipe)
    gpu = torch.cuda.is_available()
    large = parameters > LARGE_PARAMETERS
    torch.manual_seed(recipe.seed)
    model = load_base(torch.bfloat16 if large or gpu else torch.float32)

    class Reports(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            progress("training", state.global_step, state.max_steps)

    def data(rows: Sequence[TrainingRow]) -> Any:
        return Dataset.from_list([{"input_ids": row.ids, "labels": row.labels} for row in rows])

    trainer = SFTTrainer(
        model=model,
        args=_training_arguments(recipe, folder, gpu=gpu, large=large),
        train_dataset=data([*learned] * recipe.epochs + [*rehearsed] * recipe.rehearsals),
        eval_dataset=data(held_out) if held_out else None,
        processing_class=_padding_tokenizer(),
        peft_config=LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            lora_dropout=0.0,
            target_modules=list(MATRICES),
            bias="none",
            task_type="CAUSAL_LM",
        ),
        callbacks=[Reports()],
    )

    trainer.remove_callback(PrinterCallback)

    def held_out_loss() -> float | None:
        return float(trainer.evaluate()["eval_loss"]) if held_out else None

    if "before" not in state:
        state["before"] = held_out_loss()
        _write(folder, state)
    checkpoint = _last_checkpoint(folder)
    resumed_at = int(checkpoint.name.rpartition("-")[2]) if checkpoint is not None else 0
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    if not math.isfinite(result.training_loss):
        raise TuningError("training diverged to NaN or infinity: try a lower learning rate")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-10:]
    after = held_out_loss()
    return TrainingResult(
        _save_adapter(trainer.model, folder),
        int(trainer.state.global_step),
        resumed_at,
        sum(losses) / max(len(losses), 1),
        state["before"],
        after,
    )


def _training_arguments(recipe: Recipe, folder: Path, *, gpu: bool, large: bool) -> Any:
    from trl import SFTConfig

    one_by_one = large or not gpu  # on a CPU, batches are not faster, and padding them costs time
    return SFTConfig(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=1 if one_by_one else recipe.batch_rows,
        gradient_accumulation_steps=recipe.batch_rows if one_by_one else 1,
        per_device_eval_batch_size=1 if one_by_one else recipe.batch_rows,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=None,
        packing=False,
        gradient_checkpointing=large,
        bf16=gpu,
        use_cpu=not gpu,
        save_strategy="steps",
        save_steps=recipe.checkpoint_steps,
        save_total_limit=CHECKPOINTS_KEPT,
        logging_steps=1,
        seed=recipe.seed,
        data_seed=recipe.seed,
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        eval_strategy="no",
    )


def _save_adapter(model: Any, folder: Path) -> Path:
    # An earlier adapter is replaced only when the new one is complete.
    unfinished, saved = folder / f"{ADAPTER_FOLDER}.new", folder / ADAPTER_FOLDER
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    shutil.rmtree(saved, ignore_errors=True)
    unfinished.replace(saved)
    return saved


def _open_run(folder: Path, digest: str, day: date, recipe: Recipe) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        state: dict[str, Any] = json.loads((folder / RUN_FILE).read_text("utf-8"))
    except FileNotFoundError:
        state = {"digest": digest, "day": day.isoformat(), "recipe": asdict(recipe)}
        _write(folder, state)
    except (ValueError, RecursionError):
        raise TuningError(f"{folder / RUN_FILE} is not JSON: use --restart to start over") from None
    if not isinstance(state, dict) or state.get("digest") != digest:
        raise TuningError(f"{folder} contains a run with other rows, model or settings: use --restart to start over")
    return state


def _write(folder: Path, state: dict[str, Any]) -> None:
    part = folder / f"{RUN_FILE}.part"
    part.write_text(json.dumps(state), "utf-8")
    part.replace(folder / RUN_FILE)


def _last_checkpoint(folder: Path) -> Path | None:
    found = None
    numbered = [path for path in folder.iterdir() if re.fullmatch(r"checkpoint-[0-9]{1,18}", path.name)]
    for path in sorted(numbered, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        # The state file is written last, so a checkpoint without a valid one is incomplete.
        try:
            json.loads((path / "trainer_state.json").read_text("utf-8"))
            found = found or path
        except (OSError, ValueError, RecursionError):
            shutil.rmtree(path, ignore_errors=True)
    return found


def _padding_tokenizer() -> Any:
    # TRL requires a tokenizer, but uses it only for padding, because rows are already tokenized.
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model = tokenizers.models.WordLevel({"<pad>": 0}, unk_token="<pad>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="<pad>", eos_token="<pad>", unk_token="<pad>"
    )
