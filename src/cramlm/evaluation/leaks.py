"""Test scores twice where test rows stand in train as well: on the released split, and on the rows that do not.

Two public tasks show why: ACL-ARC citation intent has 52 of its 139 test rows verbatim in train, HyperPartisan 51 of 65.
"""

from __future__ import annotations

from collections.abc import Sequence

from cramlm.data.hygiene import check_task
from cramlm.evaluation.kinds import KINDS, AnyScores
from cramlm.records import Task


def score_test(task: Task, predicted: Sequence[str]) -> tuple[AnyScores, AnyScores | None]:
    """Scores on all test rows, and on those whose text is not in train (None if that is all or none of them)."""
    true = [str(example.label) for example in task.test]
    kept = check_task(task).leak_free_test.tolist()
    score = KINDS[task.kind].score
    whole = score(true, predicted, task.labels)
    if not 0 < len(kept) < len(true):
        return whole, None
    return whole, score([true[index] for index in kept], [predicted[index] for index in kept], task.labels)
