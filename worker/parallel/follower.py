"""What ranks other than 0 of a tensor-parallel worker do: as they are told, on their part of the model."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from graphs.buckets import BucketLadder, StepLadder
from scheduler.errors import ConfigError
from scheduler.messages import PoolHandle, WorkerConfig
from worker import startup
from worker.handoff.base import Handoff
from worker.kv_pool import KVPool
from worker.model import Model
from worker.model_runner import ModelRunner
from worker.parallel.group import ShardGroup, join_group
from worker.parallel.link import (
    ChooseNumPages,
    ClosePool,
    Command,
    CopyPages,
    MakePool,
    MakePrefill,
    Meeting,
    OpenPool,
    PrepareSteps,
    Reply,
    RunBatch,
    RunPrompt,
    UsePool,
    end_with_leader,
)
from worker.prefill import PrefillEngine

_REFUSAL_TIMEOUT_S = 60.0
"""A leader that has not refused the model by then can only wait for this rank."""


class Follower:
    """Owns one rank's part of a model, with the pages and graphs of that rank."""

    def __init__(self, config: WorkerConfig, model: Model, group: ShardGroup, connection: Connection) -> None:
        self._config = config
        self._model = model
        self._group = group
        self._connection = connection
        self._prefill: PrefillEngine
        self._opened: Handoff
        self._pool: KVPool
        self._steps: ModelRunner

    def run(self) -> None:
        """Do as the leader says until it is gone."""
        while True:
            try:
                command: Command = self._connection.recv()
            except (EOFError, OSError):
                return
            with torch.inference_mode():
                self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case RunBatch():
                self._group.runners[command.runner].follow(command)
            case RunPrompt():
                self._group.runners[command.runner].follow_prompt(command)
            case CopyPages():
                self._prefill.copy_pages(command)
            case _:
                try:
                    reply = Reply(value=self._answer(command))
                except ConfigError as error:
                    reply = Reply(error=str(error))
                self._connection.send(reply)

    def _answer(self, command: Command) -> Any:
        """Carry out a command that is replied to. Raises `ConfigError` if it cannot be."""
        config = self._config
        match command:
            case MakePrefill():
                self._prefill = PrefillEngine(
                    config.name,
                    self._model,
                    BucketLadder(command.capture_tokens, command.capture_slots, may_shrink=False),
                    use_graphs=config.use_graphs,
                    node_id=command.node_id,
                    handoff_transport=config.handoff_transport,
                )
            case OpenPool():
                self._prefill.detach(command.handle.decode_worker)
                self._opened = self._prefill.find_way(command.handle)
            case UsePool():
                self._prefill.attach_handoff(command.decode_worker, self._opened)
            case ClosePool():
                self._prefill.detach(command.decode_worker)
            case ChooseNumPages():
                return startup.choose_num_pages(self._model, config)
            case MakePool():
                return self._make_pool(command.num_pages)
            case PrepareSteps():
                ladder = StepLadder(config.max_num_seqs)
                self._steps = ModelRunner(
                    self._model, self._pool, ladder, use_graphs=config.use_graphs, steps=True
                )
                self._steps.prepare()
            case _:
                raise AssertionError(f"{command} has no reply")
        return None

    def _make_pool(self, num_pages: int) -> PoolHandle:
        self._pool, handle = KVPool.create(
            self._model.kv_spec,
            name=f"{self._config.name}-rank-{self._group.rank}",
            num_pages=num_pages,
            page_size=startup.page_size(self._model),
            device=self._model.device,
        )
        return handle


def follow(config: WorkerConfig, meeting: Meeting, rank: int) -> NoReturn:
    """Be a rank of a worker's group until its leader is gone, and with it this process."""
    device = torch.device(startup.choose_device(config.device))
    group, connection = join_group(meeting, rank=rank, size=config.tensor_parallel_size, device=device)
    # Beside everything else, since a rank that waits for another in a pass does not listen.
    end_with_leader(connection)
    try:
        model = startup.load(config, group)
    except ConfigError:
        # The leader finds the same, says so, and is gone; unless something is wrong with this rank alone.
        if _is_gone(connection):
            os._exit(0)
        raise
    Follower(config, model, group, connection).run()
    os._exit(0)


def _is_gone(connection: Connection) -> bool:
    """Wait until the leader says or ends something; return whether that is the connection."""
    if connection.poll(_REFUSAL_TIMEOUT_S):
        try:
            connection.recv()
        except (EOFError, OSError):
            return True
    return False
