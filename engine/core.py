"""The engine without text: requests of token ids in, events of token ids out.

One step is: schedule, launch, settle. With overlap it settles the step before the one that it
launched, so the host schedules while the device computes; what a step touches stays untouched until
that step is settled. Whatever one request does wrong ends that request with an event; the core goes
on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

from tokenfleet.engine.accounts import Accounts
from tokenfleet.engine.admission import Admission
from tokenfleet.engine.budget import Budget
from tokenfleet.engine.compiling import Compiling
from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.constraints import ConstraintCompiler
from tokenfleet.engine.errors import InvariantBroken, WrongState
from tokenfleet.engine.execution.flight import Flight, Timing
from tokenfleet.engine.execution.loading import LoadedModel, load_model
from tokenfleet.engine.execution.weights import NewWeights
from tokenfleet.engine.reporting import Reporter
from tokenfleet.engine.request import CoreEvent, EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.scheduling.audit import ownership_faults, scheduler_faults
from tokenfleet.engine.scheduling.block_pool import BlockPool
from tokenfleet.engine.scheduling.limits import limits_of
from tokenfleet.engine.scheduling.plan import StepPlan
from tokenfleet.engine.scheduling.prefix_cache import PrefixCache
from tokenfleet.engine.scheduling.scheduler import Scheduler
from tokenfleet.engine.stats import StepStats

__all__ = ["CoreEvent", "EngineCore", "EngineRequest"]


class EngineCore:
    """Scheduler, cache and model in one process, driven by `step`. Not safe for concurrent use.

    Args:
        config: what to load and how much of the machine to use.
        known_tokens: ids that the tokenizer has, the others are never sampled; None = all.
        compiler: of structured outputs; None refuses requests that ask for them.
        load: makes the model; replaced where a step is simulated.

    Raises:
        ConfigError, UnsupportedModel, CheckpointError: before anything runs.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        known_tokens: Collection[int] | None = None,
        compiler: ConstraintCompiler | None = None,
        load: Callable[[EngineConfig, Collection[int] | None], LoadedModel] = load_model,
    ) -> None:
        model = load(config, known_tokens)
        self.config = config
        self.spec = model.spec
        self.runner = model.runner
        self.max_len = model.max_len
        self.limits = limits_of(config, model.block_size)
        self.cache = PrefixCache() if config.prefix_cache else None
        self.scheduler = Scheduler(self.limits, BlockPool(model.num_blocks, self.cache), self.cache)
        self.stats = StepStats(blocks_total=model.num_blocks)
        self._reporter = Reporter(self.stats, self.scheduler, model.traffic)
        self._accounts = Accounts(self.scheduler)
        self._flights: deque[tuple[StepPlan, Flight]] = deque()
        """Launched and not settled, oldest first."""
        self._ahead = int(model.overlap)
        """Steps that may be in flight when a step returns."""
        self._compiling = Compiling(compiler)
        self._admission = Admission(
            model.spec,
            model.max_len,
            accounts=self._accounts,
            scheduler=self.scheduler,
            compiling=self._compiling,
            seed=config.seed,
        )
        self._budget = Budget(self.limits)
        self._asleep = False
        self._incomplete = False

    # -- requests --------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report something."""
        return bool(self._accounts or self._compiling or self._flights)

    @property
    def weights_version(self) -> int:
        """Updates of the weights since the start."""
        return self._accounts.weights_version

    @property
    def free_slots(self) -> int:
        """Slots that neither a running nor a waiting sequence will take."""
        return self.scheduler.num_free_slots - self._compiling.num_choices

    def prepare_grammars(self) -> None:
        """Build in the background what the first structured output would make all others wait for.

        A good moment is one in which there is no work; without it that output does it.
        """
        self._compiling.prepare()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; its first event comes from a later step.

        Raises:
            InvalidRequest: with a code and what to do; nothing was queued.
            WrongState: the engine sleeps.
        """
        self._must_be_awake("take a request")
        self._admission.add(request)

    def fork(
        self, request_id: str, new_id: str, params: SamplingParams | None = None, choice: int = 0
    ) -> None:
        """Start a request whose prompt is all tokens of a running one so far.

        It shares that one's KV blocks and runs on its own; its output starts behind the fork.

        Raises:
            InvalidRequest: `unknown_id` when the choice is not running; else as `add`.
        """
        self._admission.fork(request_id, new_id, params, choice)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, with finish_reason "cancelled" in the next step.

        Unknown and finished ids do nothing. The id is free for reuse after the event.
        """
        compiling = self._compiling.cancel(request_id) if choice is None else None
        if compiling is not None:
            self._accounts.cancelled(compiling)
        else:
            self._accounts.abort(request_id, choice)

    def finish(self, request_id: str, choice: int) -> None:
        """End one choice without an event: a stop string was found in its text."""
        self._accounts.finish(request_id, choice)

    # -- one step --------------------------------------------------------------------------

    def step(self) -> list[CoreEvent]:
        """Compute one step; events of the choices that got something, [] when there are none.

        With overlap they are those of the step before; a step that computes nothing waits for it.
        After an exception (an interrupt) the running sequences are computed again.

        Raises:
            WrongState: the engine sleeps, or an update of its weights broke off.
        """
        self._must_be_awake("compute a step")
        if self._incomplete:
            raise WrongState("an update of the weights broke off half way; update them again")
        try:
            return self._step()
        except BaseException:
            self._flights.clear()
            self.scheduler.restart()
            raise

    def _step(self) -> list[CoreEvent]:
        started = time.perf_counter()
        if self._compiling:
            self._admission.open_compiled(idle=not self._accounts)
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        timing = Timing()
        if plan:
            flight = self.runner.launch(plan)
            timing = flight.timing
            self._flights.append((plan, flight))
            self._budget.after_step(timing.out_of_memory)
            self.scheduler.limits = self._budget.limits
        events = self._accounts.give_pending()
        kept = self._ahead if plan and not plan.starved else 0
        while len(self._flights) > kept:
            events += self._settle_oldest(timing)
        self._reporter.step(
            plan,
            timing,
            started=started,
            scheduled=scheduled,
            num_errors=self._accounts.num_errors,
        )
        return events

    def _settle_oldest(self, timing: Timing) -> list[CoreEvent]:
        """Events of the oldest flight; the time spent on waiting for it is added to `timing`."""
        plan, flight = self._flights.popleft()
        began = time.perf_counter()
        result = self.runner.collect(flight)
        timing.sample_s += time.perf_counter() - began
        return self._accounts.settle(plan, result)

    # -- weights and memory ----------------------------------------------------------------

    def update_weights(self, weights: NewWeights) -> int:
        """Replace all weights between two steps; the new weights version.

        Requests go on: what they have said stays, and what was computed for them (as every cached
        prefix) is computed again with the new weights. Steps in flight are settled first; their
        events come with the next step.

        Args:
            weights: directory of a checkpoint of the same model, or every tensor of one by name,
                as they are before any quantization. They must not change until this returns.

        Raises:
            CheckpointError: something is missing, left over, or of another shape or form; nothing
                was changed. If a file changes while it is read, the weights are incomplete: steps
                raise WrongState until an update succeeds.
            WrongState: the engine sleeps.
        """
        self._must_be_awake("update its weights")
        update = self.runner.prepare_weights(weights)
        self._settle_all()
        self._incomplete = True
        update.write()
        self._incomplete = False
        self._forget_kv()
        self._accounts.weights_version += 1
        for request, sequences in self._accounts.requests():
            for sequence in sequences:
                sequence.cache_context = self._admission.cache_context(request)
        return self.weights_version

    def sleep(self) -> None:
        """Give up the memory of KV blocks, graphs and, on CUDA, weights, which wait on the host.

        Raises:
            WrongState: requests have not ended, or it sleeps already.
        """
        self._must_be_awake("go to sleep")
        if self._accounts or self._compiling:
            raise WrongState("requests have not ended; the engine goes to sleep only when idle")
        self._settle_all()  # a step for somebody who had ended already
        self._forget_kv()
        self.runner.sleep()
        self._asleep = True

    def wake(self) -> None:
        """Come back from `sleep` with the same weights, and nothing cached.

        Raises:
            WrongState: it does not sleep.
            ConfigError: the memory is not there (yet); it sleeps on, and may be woken later.
        """
        if not self._asleep:
            raise WrongState("the engine is awake; only one that sleeps can be woken")
        self.runner.wake()
        self._asleep = False

    def _must_be_awake(self, purpose: str) -> None:
        if self._asleep:
            raise WrongState(f"the engine sleeps and cannot {purpose}; wake it first")

    def _settle_all(self) -> None:
        events = self._accounts.give_pending()
        while self._flights:
            events += self._settle_oldest(Timing())
        self._accounts.pending = events

    def _forget_kv(self) -> None:
        """Nothing that is in the blocks is known any more."""
        self.scheduler.restart()
        self.scheduler.pool.forget_prefixes()

    def audit(self) -> None:
        """Check every invariant of blocks, slots and tables.

        Raises:
            InvariantBroken: listing what contradicts itself.
        """
        found = scheduler_faults(self.scheduler)
        found += ownership_faults(self.scheduler, set(self._accounts.sequences()))
        if found:
            raise InvariantBroken("; ".join(found))
