"""The contract of a copy engine: which bytes move, when they are there, and what is reported."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np

from kvpolicy import PluginError
from kvpolicy.testing.bench import injured, one_by_one, told, written_bytes
from kvpolicy.testing.contract import UNDER_TEST, broken, check, hooks_of, numbered, plugin_set
from kvpolicy.testing.large import SIZES, large_difference
from kvpolicy.testing.moving import TransferCase
from kvpolicy.testing.strategies import trials
from kvpolicy.testing.trial import Trial
from kvpolicy.testing.world import row_difference

_CERTIFIED = trials()


class TransferContract(TransferCase):
    """Numbered properties T1 to T13 of a copy engine; subclass it in a test module.

    ``class TestMine(TransferContract)`` with `make_transfer` is enough for pytest. Jobs are those
    that the core makes, from per-layer caches and slabs, canonical or not. Their caches lie on
    ``device``; what comes of them is compared on the CPU.

    Attributes:
        device: the torch device of the engine's caches.
        examples: examples for each property.
        derandomize: whether they are the same in every run.
    """

    @numbered(_CERTIFIED)
    def test_t1_the_plugin_loads_and_has_the_hook(self, trial: Trial) -> None:
        """T1: rehearsal passes, and the plugin implements ``transfer``."""
        del trial
        try:
            hooks = hooks_of(plugin_set({UNDER_TEST: self.make_transfer()}))
        except PluginError as error:
            broken("T1", f"the plugin cannot be loaded: {error}")
        check("transfer" in hooks, "T1", f"transfer is not among its hooks, {hooks}")

    @numbered(_CERTIFIED)
    def test_t2_what_it_does_not_support_it_declines_untouched(self, trial: Trial) -> None:
        """T2: None for a job of another device, or one that ``supports`` says no to."""
        for bench in self._both(trial):
            rows, memory = bench.rows(), bench.memory.snapshot()
            for device in ("cpu", "cuda:0", "meta"):
                job = attrs.evolve(bench.job, device=device)
                if not self.supports(job):
                    handle = self._offer("T2", job)
                    told_ = f"supports says no to device {device!r}, but it took {told(job)}"
                    check(handle is None, "T2", told_)
            same = np.array_equal(rows, bench.rows())
            same = same and all(map(np.array_equal, memory, bench.memory.snapshot()))
            check(same, "T2", "a job was declined, and yet bytes moved")

    @numbered(_CERTIFIED)
    def test_t3_a_store_moves_exactly_the_oracle_s_bytes(self, trial: Trial) -> None:
        """T3: rows hold this rank's part of the records; engine memory is as it was."""
        self._moved("T3", self._store(trial))

    @numbered(_CERTIFIED)
    def test_t4_a_load_moves_exactly_the_oracle_s_bytes(self, trial: Trial) -> None:
        """T4: blocks hold this rank's part of the records; rows are as they were."""
        self._moved("T4", self._load(trial))

    @numbered(_CERTIFIED)
    def test_t5_nothing_else_changes(self, trial: Trial) -> None:
        """T5: other blocks and slots, padding and guard zones keep their sentinels."""
        for bench in self._both(trial):
            before = bench.rows()
            self._run("T5", bench.job)
            wrong = bench.wrong(before, kept=set())
            check(wrong is None, "T5", f"{told(bench.job)} on rank {bench.rank}: {wrong}")

    @numbered(_CERTIFIED)
    def test_t6_what_is_done_is_there(self, trial: Trial) -> None:
        """T6: when ``done`` says so, every byte has been written; the result stays the same."""
        for bench in self._both(trial):
            before, handle = bench.rows(), self._taken("T6", bench.job)
            result = self._ended("T6", handle, bench.job)
            wrong = bench.wrong(before)
            check(wrong is None or not result.ok, "T6", f"{told(bench.job)}, once done: {wrong}")
            check(handle.done() and handle.result() == result, "T6", "a second result differs")

    @numbered(_CERTIFIED)
    def test_t7_a_success_is_reported_in_full(self, trial: Trial) -> None:
        """T7: this job's id, all its bytes, no failed ids, no error."""
        for bench in self._both(trial):
            job, result = bench.job, self._run("T7", bench.job)
            known = (result.job_id, result.bytes, result.failed_ids, result.error)
            told_ = f"reported {result}, expected job {job.job_id}, {job.bytes} B, no failed ids"
            check(known == (job.job_id, job.bytes, (), ""), "T7", told_)

    @numbered(_CERTIFIED)
    def test_t8_sources_may_repeat(self, trial: Trial) -> None:
        """T8: one block stored to several slots, one slot loaded to several blocks."""
        blocks = list(range(trial.context.geometry.num_blocks))
        source = [trial.blocks[0]] * len(trial.slots)
        self._moved("T8", self._store(trial, source, trial.slots))
        self._moved("T8", self._load(trial, [trial.slots[0]] * len(blocks), blocks))

    @numbered(_CERTIFIED)
    def test_t9_jobs_at_once_do_not_disturb_one_another(self, trial: Trial) -> None:
        """T9: one job for each pair, each from a thread of its own; then every byte is compared."""
        for bench in self._both(trial):
            jobs, before = one_by_one(bench.job), bench.rows()
            self._plugins()
            with ThreadPoolExecutor(len(jobs)) as pool:
                results = list(pool.map(lambda job: self._run("T9", job), jobs))
            for job, result in zip(jobs, results, strict=True):
                told_ = f"job {job.job_id}, one of {len(jobs)} at once, ended as {result}"
                check((result.job_id, result.bytes) == (job.job_id, job.bytes), "T9", told_)
            wrong = bench.wrong(before)
            check(wrong is None, "T9", f"{len(jobs)} jobs at once, {told(bench.job)}: {wrong}")

    @numbered(_CERTIFIED)
    def test_t10_a_failure_in_the_middle_is_a_true_result(self, trial: Trial) -> None:
        """T10: what is not named as failed is all there, and the engine goes on."""
        for bench in self._both(trial):
            for how, job in injured(bench.job):
                before, result = bench.rows(), self._survived(how, job)
                kept = bench.destinations - {*result.failed_ids}
                wrong = bench.wrong(before, kept)
                told_ = f"{told(job)} with {how} reported {result}, but {wrong}"
                check(wrong is None, "T10", told_)
                least = written_bytes(job, kept)
                told_ = f"{told(job)} with {how} reported {result.bytes} B of {job.bytes}; what is "
                told_ += f"not named as failed has {least} B"
                check(least <= result.bytes <= job.bytes, "T10", told_)
            self._moved("T10", bench)

    @numbered(_CERTIFIED)
    def test_t11_a_plan_serves_again_and_stays_as_it_is(self, trial: Trial) -> None:
        """T11: a later job of the same plan moves what is there then; the job is not changed."""
        for bench in self._both(trial):
            parts = [(p.plan, p.block_ids.tolist(), p.slots.tolist()) for p in bench.job.parts]
            self._moved("T11", bench)
            bench.renew()
            self._moved("T11", bench)
            after = [(p.plan, p.block_ids.tolist(), p.slots.tolist()) for p in bench.job.parts]
            check(parts == after, "T11", f"{told(bench.job)} was changed while it ran")

    @numbered(_CERTIFIED)
    def test_t12_a_connector_stores_and_loads_with_it(self, trial: Trial) -> None:
        """T12: all ranks, through connectors, there and back."""
        world, group = self._world(trial, self._once(self.make_transfer)), trial.group_layers
        records = list(range(len(trial.blocks)))
        world.write(group, trial.blocks, records)
        self._through("T12", world.store, trial.blocks, trial.slots, group)
        expected = world.expected_rows(group, trial.slots, records)
        wrong = row_difference(world.pool.rows.numpy(), expected, trial.context, group)
        check(wrong is None, "T12", f"stored by all ranks: {wrong}")
        back = [trial.context.geometry.num_blocks - 1 - block for block in trial.blocks]
        world.wipe()
        self._through("T12", world.load, trial.slots, back, group)
        for rank, memory in enumerate(world.memories):
            wrong = memory.difference(world.fresh(rank, group, back, records))
            check(wrong is None, "T12", f"loaded on rank {rank}: {wrong}")

    def test_t13_a_large_job_is_moved_whole(self) -> None:
        """T13: hundreds of blocks, dozens of layers, pages of many KiB, there and back."""
        for size in SIZES:
            wrong = large_difference(self.make_transfer(), self.device, size)
            check(wrong is None, "T13", str(wrong))
