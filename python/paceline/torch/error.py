"""What a failed operation raises."""

import torch.distributed as dist


class CollectiveError(dist.DistBackendError):
    """An operation between ranks failed. All ranks are global ranks.

    ``rank``
        This rank.
    ``culprits``, ``culprit``
        The ranks to blame, and the first of them; empty and None if it is not known.
    ``hosts``
        The culprits' hosts.
    ``operation``
        What failed here, such as "all-reduce"; None while the group formed.
    ``kind``
        "timeout", "mismatch", "lost" (a rank died), "left" (it ended in order), "aborted" (it gave up), "configuration", "call" (wrong
        arguments), "handle" (a group of another process, or one that was destroyed), "bug" or "other".
    ``hint``
        What to do about it, or None.
    """

    def __init__(self, report, ranks, rank):
        message = f"[rank {rank}] {report['message']}"
        if report["hint"]:
            message += f"\n  {report['hint']}"
        super().__init__(message)
        self.report = report
        self.rank = rank
        self.kind = report["kind"]
        self.hint = report["hint"]
        self.hosts = report["hosts"]
        self.operation = report["operation"]
        self.culprits = [ranks[culprit] for culprit in report["culprits"] if culprit < len(ranks)]
        self.culprit = self.culprits[0] if self.culprits else None
