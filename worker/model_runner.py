"""Runs passes of a model over sequences in KV pages: the part that prefill and decode share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from graphs.buckets import Bucket, Ladder
from graphs.layout import BatchInputs, BatchLayout, HostBatch, SlotInput
from graphs.programs import Computation, Ticket
from graphs.runner import BucketReport, GraphRunner
from graphs.shaping import ShapingBuffers
from scheduler.messages import Request
from worker.kv_pool import KVPool
from worker.model import Model
from worker.outputs import OutputState, track
from worker.parallel.link import RunBatch, RunPrompt
from worker.sampling import CHOICES, COMPILABLE_CHOICES, needed_choice
from worker.sampling.logprobs import make_report

_PROMPT_CHUNK_TOKENS = 256
"""Most tokens of a prompt whose logits are in memory at once: 156 MB of float32 for a vocabulary of 152,000."""
_LOG = logging.getLogger(__name__)
Choose = Callable[[torch.Tensor, BatchInputs], torch.Tensor]


class ModelRunner:
    """Owns the static buffers and graphs of one ladder over one KV pool, and chooses each sequence's next token.

    With `steps`, its batches are decode steps: one token for each sequence. A token id of ``-1 - row`` stands there
    for the token that the batch before chose in this row, which the host need not know yet.

    Of a model in parts, the runner of rank 0 has those of the other ranks `follow` each of its passes, and chooses
    for all of them.
    """

    def __init__(
        self, model: Model, pool: KVPool, ladder: Ladder, *, use_graphs: bool = True, steps: bool = False
    ) -> None:
        self._model = model
        self._pool = pool
        self._steps = steps
        self._group = model.group
        self.id = 0 if self._group is None else self._group.enrol(self)
        """By which the other ranks know it."""
        self.eager_reason = None if use_graphs or pool.device.type == "cpu" else "disabled"
        """Why passes run without graphs on a device that has them, or None."""
        self._graphs = self._make_graphs(ladder)

    @property
    def ladder(self) -> Ladder:
        """The buckets that batches must fit."""
        return self._graphs.ladder

    @property
    def size_bytes(self) -> int:
        """Bytes of all static buffers and graphs."""
        return self._graphs.size_bytes

    @torch.inference_mode()
    def prepare(self) -> tuple[BucketReport, ...]:
        """Capture and time every bucket. The ladder may shrink, if memory does not suffice for all of it.

        A model that cannot be captured runs eagerly, and says why.
        """
        try:
            return self._graphs.prepare()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self._pool.device.type == "cpu" or self.eager_reason is not None:
                raise
            _LOG.warning("%s cannot be captured and runs without graphs: %s", self._model.info.name, error)
            self.eager_reason = "not_capturable"
            self._graphs = self._make_graphs(self._graphs.ladder)
            return self._graphs.prepare()

    def submit(self, slots: Sequence[SlotInput]) -> Ticket:
        """Start to compute the tokens of `slots` in one pass; its result is the next token after each."""
        return self._graphs.submit(slots)

    @torch.inference_mode()
    def follow(self, batch: RunBatch) -> None:
        """Start to compute a pass that rank 0 has packed."""
        words = torch.frombuffer(bytearray(batch.words), dtype=torch.int32)
        self._graphs.follow(Bucket(batch.num_tokens, batch.num_slots), batch.finish, words)

    @torch.inference_mode()
    def follow_prompt(self, part: RunPrompt) -> None:
        """Start to compute a part of a prompt of which rank 0 makes a report."""
        words = torch.frombuffer(bytearray(part.words), dtype=torch.int32)
        inputs = BatchInputs.of(self._prompt_layout(part.num_tokens), words.to(self._pool.device))
        self._model.all_logits(inputs, self._pool)

    def track(self, request: Request) -> OutputState | None:
        """Return what the settings of a sequence must know of its tokens, or None if nothing.

        Raises `InvalidRequestError` that names the field if a setting is none that can be computed.
        """
        return track(request, self._model.grammars, vocab_size=self._model.info.vocab_size)

    @torch.inference_mode()
    def report_prompt(self, token_ids: Sequence[int], page_ids: Sequence[int]) -> list[torch.Tensor]:
        """Start to compute how likely each token of a prompt is after those before it; write its KV on the way.

        This takes passes of its own, without graphs: one for each tensor returned. Together they are the report's
        rows, ``[len(token_ids) - 1, width]``.
        """
        report, rows = make_report(self._model.info.vocab_size), []
        last = len(token_ids) - 1
        size = min(_PROMPT_CHUNK_TOKENS, self.ladder.buckets[0].num_tokens)
        for start in range(0, last, size):
            end = min(start + size, last)
            layout = self._prompt_layout(end - start)
            host = HostBatch(layout)
            host.pack([SlotInput(token_ids=token_ids[start:end], num_cached=start, page_ids=page_ids)])
            if self._group is not None and self._group.leader is not None:
                words = host.tensor.numpy().tobytes()
                self._group.leader.tell(RunPrompt(runner=self.id, num_tokens=end - start, words=words))
            inputs = BatchInputs.of(layout, host.tensor.to(self._pool.device))
            logits = self._model.all_logits(inputs, self._pool)
            following = torch.tensor(token_ids[start + 1 : end + 1], device=logits.device)
            rows.append(report.compute(logits, following))
        return rows

    def _prompt_layout(self, num_tokens: int) -> BatchLayout:
        return BatchLayout(
            bucket=Bucket(num_tokens, 1), pages_per_slot=self._pages_per_slot, page_size=self._pool.page_size
        )

    def _announce(self, bucket: Bucket, finish: str, words: torch.Tensor) -> None:
        assert self._group is not None
        assert self._group.leader is not None
        self._group.leader.tell(
            RunBatch(
                runner=self.id,
                num_tokens=bucket.num_tokens,
                num_slots=bucket.num_slots,
                finish=finish,
                words=words.numpy().tobytes(),
            )
        )

    @property
    def _pages_per_slot(self) -> int:
        return -(-self._model.info.max_model_len // self._pool.page_size)

    def _make_graphs(self, ladder: Ladder) -> GraphRunner:
        captured = self._pool.device.type == "cuda" and self.eager_reason is None
        logits = self._model.compiled_logits if captured else self._model.logits
        pool = self._pool

        def forward(inputs: BatchInputs) -> torch.Tensor:
            if self._steps:
                # In place, so that what chooses a token sees it too.
                take_chosen(inputs.token_ids, self._graphs.output)
            return logits(inputs, pool, is_step=self._steps)

        finishes = dict(CHOICES)
        if captured:
            # Importing inductor takes seconds, and on the CPU it is not needed.
            from worker.compiled import compile_choice

            any_slots = len({bucket.num_slots for bucket in ladder.buckets}) > 1
            finishes |= {
                name: compile_choice(finishes[name], any_slots=any_slots) for name in COMPILABLE_CHOICES
            }
        if self._group is not None:
            finishes = {name: self._choose_once(choose) for name, choose in finishes.items()}
        is_follower = self._group is not None and self._group.leader is None
        vocab_size = self._model.info.vocab_size
        max_slots = max(bucket.num_slots for bucket in ladder.buckets)
        return GraphRunner(
            Computation(
                forward=forward,
                finishes=finishes,
                choose_finish=needed_choice,
                report=None if is_follower else make_report(vocab_size),
            ),
            ladder,
            pages_per_slot=self._pages_per_slot,
            page_size=pool.page_size,
            device=pool.device,
            use_graphs=captured,
            announce=None if self._group is None or is_follower else self._announce,
            shaping=None
            if is_follower
            else ShapingBuffers(
                max_slots=max_slots,
                vocab_size=vocab_size,
                # Sequences may share pages, so that their histories are longer than the pool together.
                history_tokens=max_slots * self._pages_per_slot * pool.page_size,
                device=pool.device,
            ),
        )

    def _choose_once(self, choose: Choose) -> Choose:
        """Return how this rank of a group has the tokens that rank 0 chooses. Of prompts nobody else wants them."""
        group = self._group
        assert group is not None

        def choose_once(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
            if group.rank == 0:
                tokens = choose(logits, inputs)
            else:
                tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
            if self._steps:
                group.broadcast(tokens)
            return tokens

        return choose_once


def take_chosen(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Replace every ``-1 - row`` of `token_ids`, int32, by the token in this row of `chosen`, int64."""
    if token_ids.device.type == "cuda":
        from worker.triton_decode import launch_take_chosen  # Triton comes with CUDA only.

        launch_take_chosen(token_ids, chosen)
    else:
        newest = chosen[(-1 - token_ids).clamp_(min=0)]
        torch.where(token_ids < 0, newest.to(token_ids.dtype), token_ids, out=token_ids)
