"""Requests of one text each, sent to an engine as one request of all these texts: an engine's time goes by requests."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from ftbert.server.job import Failure, Job, Part, Result


class JoinedJobs:
    """Of one connection to an engine."""

    def __init__(self) -> None:
        self._members: dict[int, list[Job | None]] = {}  # of a joined request, by text; None: answered, or left
        self._joined_in: dict[int, int] = {}  # a member's id: the joined request's

    def join(self, jobs: list[Job], new_id: int, most: float) -> list[Job]:
        """What to send: jobs like the first one as a single job `new_id`, of up to `most` tokens, and all others."""
        alike, tokens = [], 0
        for job in jobs:
            if tokens + job.tokens <= most and _joins(job, jobs[0]):
                alike.append(job)
                tokens += job.tokens
        if len(alike) < 2:
            return jobs
        offsets = np.cumsum([0, *(job.tokens for job in alike)])
        joined = Job(
            new_id, alike[0].kind, np.concatenate([job.ids for job in alike]), offsets,
            min(job.deadline for job in alike), adapter=alike[0].adapter, sent=min(job.sent for job in alike),
        )  # fmt: skip
        self._members[new_id] = list(alike)
        self._joined_in.update((job.id, new_id) for job in alike)
        return [joined, *(job for job in jobs if job.id not in self._joined_in)]

    def apart(self, found: list[Result]) -> tuple[list[Result], list[Job]]:
        """The members' results, and members to be sent again, each by itself: the request that they were joined to
        failed, maybe for one of them."""
        results: list[Result] = []
        again: list[Job] = []
        for one in found:
            members = self._members.get(one.id)
            if members is None:
                results.append(one)
            elif isinstance(one, Part):
                for i, job in enumerate(members[one.start : one.stop]):
                    if job is not None:
                        del self._joined_in[job.id]
                        results.append(Part(job.id, 0, 1, one.rows[i : i + 1], one.queue, one.compute))
                members[one.start : one.stop] = [None] * (one.stop - one.start)
                if not any(members):
                    del self._members[one.id]
            elif isinstance(one, Failure):
                left = self._forget(one.id)
                if one.full:  # everybody is refused
                    results += [replace(one, id=job.id) for job in left]
                else:
                    again += left
        return results, again

    def leave(self, job: Job) -> int | None:
        """The id to cancel. None: others that it was joined with are still waited for, and it is computed with them."""
        joined = self._joined_in.pop(job.id, None)
        if joined is None:
            return job.id
        members = self._members[joined]
        members[members.index(job)] = None
        if any(members):
            return None
        del self._members[joined]
        return joined

    def clear(self) -> None:
        self._members.clear()
        self._joined_in.clear()

    def _forget(self, joined: int) -> list[Job]:
        """Its members without an answer."""
        left = [job for job in self._members.pop(joined) if job is not None]
        for job in left:
            del self._joined_in[job.id]
        return left


def _joins(job: Job, first: Job) -> bool:
    """Whether `job` is a single text with a single row of the result, nothing beside its ids, and the kind and adapter
    of `first`. Deadlines are close, since the earliest counts for all."""
    plain = job.texts == 1 and job.kind.rows_of == "texts" and job.deadline < inf
    beside = (job.skip, job.types, job.marked, job.targets, job.keys, job.query, job.writing)
    return (
        plain
        and (job.kind, job.adapter) == (first.kind, first.adapter)
        and abs(job.deadline - first.deadline) < 1.0
        and all(one is None for one in beside)
    )
