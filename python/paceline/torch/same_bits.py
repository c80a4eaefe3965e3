"""Data-parallel training whose weights do not depend on the number of ranks."""

import warnings

import torch
import torch.distributed as dist

from paceline import _library as library
from paceline.torch import agree, phase
from paceline.torch.buffers import Buffers
from paceline.torch.data import Loader, Shards, cut, mix, own_shards, random_states, set_random_states
from paceline.torch.group import Group
from paceline.torch.live import Live
from paceline.torch.sums import Sums


class SameBits:
    """Averages gradients over all ranks, in DistributedDataParallel's place, with the same bits on any number of ranks.

    Each global batch is cut in ``shards`` micro-batches, whatever the number of ranks. Each is computed alone, and the results are added in an
    order that depends on the number of shards only. Ranks share the shards, so there must be at least as many shards as ranks.

    ``model``
        The module, whole on every rank, on the CPU. It stays the program's own: there is no wrapper around it. All ranks get the weights
        of the group's rank 0.
    ``seed``
        Of the random numbers in forward passes, such as dropout's.
    ``group``
        The ranks, by default all. Without a process group the program is a single rank.

    Raises ValueError on all ranks if they differ in settings, model, threads or kernels.
    """

    def __init__(self, model, shards=8, seed=0, group=None):
        agree.refuse(model)
        agree.warn()
        self.model, self.shards, self.seed = model, shards, seed
        self._group = group or (dist.group.WORLD if dist.is_initialized() else None)
        self._own = own_shards(shards, self._group)
        self._batches = self._turn = 0
        self._kernels = agree.kernels()
        self._facts = {"shards": shards, "seed": seed, "names, shapes or types of the model's tensors": agree.structure(model)} | self._kernels
        self._parameters, self._flats = [], []
        self._live, self._parts = None, {}
        if self._is_joining():
            return  # the others are far ahead
        agree.compare(self._facts, self._group)
        if self._group is not None:
            self._share_weights()

    def backward(self, batch, loss_of):
        """Computes this rank's shards of a global batch, and leaves the mean gradients over all ranks in ``.grad``. Gives the mean loss.

        ``batch``
            A batch of :class:`Loader`, or a whole global batch that is the same on all ranks: a tensor, or tensors in tuples, lists and dicts,
            with a row for each sample.
        ``loss_of``
            Called with each shard's batch; gives the mean loss over its samples. The shards' means are weighted by their samples. If another
            weight is right, such as a number of tokens, it gives a tuple of the mean loss and the weight.

        As with ``loss.backward()``, gradients are added to those that are there, and afterwards it is the program's turn: clipping, the
        optimizer's step, ``zero_grad``. After an exception gradients and buffers are as before.
        """
        self._check()
        parameters = self._lay_out()
        before = [parameter.grad for parameter in parameters]
        buffers, random_numbers = Buffers(self.model), torch.get_rng_state()

        def attempt():
            return self._run(self._deal(batch), loss_of, parameters, buffers)

        try:
            means, loss = self._commit(attempt, buffers.undo)
        except BaseException:
            for parameter, grad in zip(parameters, before):
                parameter.grad = grad
            buffers.undo()
            raise
        finally:
            torch.set_rng_state(random_numbers)
            for flat in self._flats:
                flat.sums.reset()
        for parameter, old, mean in zip(parameters, before, means):
            parameter.grad = old if mean is None else mean if old is None else old.add_(mean)
        self._batches += 1
        return loss

    def recover_live(self, loader=None, **parts):
        """Has the job go on without ranks that are lost, under ``paceline run`` with ``--recovery live`` or ``auto``, and the backend ``paceline``.

        All ranks call it right before the loop, after a checkpoint was loaded. When a rank is lost, ``backward`` calls ``loss_of`` again, also for
        shards of other ranks, and the ranks get new numbers: ask ``torch.distributed.get_rank()`` when you need it.

        ``loader``
            The :class:`Loader` of the loop. With it, processes that the launcher starts in place of lost ranks (``--max-restarts``) join between
            two batches: there this call waits for that, and gives the state of another rank to model and parts.
        ``parts``
            By name, what else has a state, such as the optimizer and its schedule; with ``state_dict`` and ``load_state_dict``.

        Elsewhere it does nothing but warn. Raises ValueError on all ranks if they differ in the names of their parts.
        """
        if loader is not None and not isinstance(loader, Loader):
            kind = type(loader).__name__
            raise TypeError(f"recover_live takes a paceline.torch.Loader, and this is a {kind}; leave it out, and no lost rank is replaced")
        self._parts = parts if loader is None else {"loader": loader, **parts}
        for name, part in self._parts.items():
            agree.refuse_part(name, part)
        self._facts |= {"parts of recover_live": sorted(self._parts)}
        is_joining = self._is_joining()
        if not is_joining:
            agree.compare(self._facts, self._group)
        is_whole = isinstance(self._group, Group) and self._group is dist.group.WORLD
        if not is_whole or not self._group.go_live(admits=loader is not None):
            if self._group is not None and dist.get_rank(self._group) == 0 and dist.get_world_size(self._group) > 1:
                words = "a lost rank ends the job: no launcher recovers it live; use `paceline run --recovery live` and the backend paceline"
                warnings.warn(words, stacklevel=2)
            return
        self._live = Live(self._group, self._facts, self._adopt, self._give, self._take)
        if loader is not None:
            loader.before_batch = self._live.admit
        if is_joining:
            self._live.join()

    def with_recovery(self, function):
        """What ``function`` gives, which is called again if ranks are lost meanwhile: for other operations between ranks, such as sums of an
        evaluation. All ranks call this in the same order; ``function`` changes nothing that would count twice."""
        return self._commit(function, lambda: None)

    def state_dict(self):
        """What :meth:`load_state_dict` needs besides the model's and the optimizer's own, for any number of ranks."""
        return {"batches": self._batches, "shards": self.shards, "seed": self.seed, "kernels": dict(self._kernels)}

    def load_state_dict(self, state):
        """Goes on after the last batch. Raises ValueError if shards or seed differ, and warns of other threads or kernels."""
        for name in ("shards", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(f"the state was saved with {name}={state[name]}, and now it is {getattr(self, name)}: other bits would follow")
        for name, now in self._kernels.items():
            if state["kernels"].get(name) != now:
                warnings.warn(f"other bits may follow: {name} was {state['kernels'].get(name)}, and is {now}", stacklevel=2)
        self._batches, self._turn = state["batches"], 0

    def _is_joining(self):
        """Whether this process is to take a lost rank's place."""
        return isinstance(self._group, Group) and self._group.outlook() == library.JOINING

    def _commit(self, attempt, undo):
        outcome = attempt() if self._live is None else self._live.commit(attempt, undo)
        self._turn += 1
        return outcome

    def _adopt(self, settled):
        """Deals the work anew in the next generation of the group."""
        self._own = own_shards(self.shards, self._group)
        self._parameters = []
        self._lay_out()
        # All begin to compare their weights anew. A rank that is behind is about to complete a commit.
        self._turn = 0 if settled["completed"] == self._live.completed else -1

    def _give(self):
        """What a replacement needs."""
        return {
            "tensors": [tensor.detach() for tensor in self._tensors()],
            "grads": [parameter.grad for parameter in self.model.parameters()],
            "same": self.state_dict(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "random": random_states(),
            "steps": phase.steps(),
        }

    def _take(self, state):
        with torch.no_grad():
            for tensor, given in zip(self._tensors(), state["tensors"]):
                tensor.copy_(given)
        for parameter, grad in zip(self.model.parameters(), state["grads"]):
            parameter.grad = grad
        self.load_state_dict(state["same"])
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        set_random_states(state["random"])
        phase.go_on_after(state["steps"])

    def _tensors(self):
        return [*self.model.parameters(), *self.model.buffers()]

    def _share_weights(self):
        root = dist.get_global_rank(self._group, 0)
        with torch.no_grad():
            for tensor in self._tensors():
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, root, group=self._group)
                tensor.copy_(whole)

    def _check(self):
        if torch.get_num_threads() != self._kernels["torch threads"]:
            raise RuntimeError(f"torch had {self._kernels['torch threads']} threads, and has {torch.get_num_threads()}: other bits would follow")

    def _deal(self, batch):
        """This rank's shards of a batch."""
        own = batch if isinstance(batch, Shards) else cut(batch, self.shards, self._own)
        if own.count != self.shards:
            raise ValueError(f"the batch is cut in {own.count} shards, and SameBits has {self.shards}; give the loader as many")
        if self._live is not None:
            return own.deal(self._own)
        for shard in own:
            if shard.number not in self._own:
                raise ValueError(f"shard {shard.number} is another rank's; give the loader the group of SameBits")
        return own

    def _lay_out(self):
        """The parameters to train, with flat memory for their gradients."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if any(parameter._post_accumulate_grad_hooks for parameter in parameters):
            raise TypeError("a parameter has a hook that runs once its gradient is complete, and each shard's would set it off before the mean is known")
        if [*map(id, parameters)] != [*map(id, self._parameters)]:
            self._parameters = parameters
            by_dtype = {}
            for place, parameter in enumerate(parameters):
                by_dtype.setdefault(_dtype_of_sums(parameter.dtype), []).append(place)
            self._flats = [_Flat(parameters, places, dtype, self.shards, self._group) for dtype, places in by_dtype.items()]
        return parameters

    def _run(self, own, loss_of, parameters, buffers):
        """The mean gradients, None for those that no shard has, and the mean loss."""
        by_number = {shard.number: shard for shard in own}
        # Of each shard its loss, its weight, and of its rank the number of the batch and a check of the weights; other ranks add zeros.
        told = [[0.0] * self.shards for _ in range(4)]
        check = agree.fingerprint(self.model, self._turn)
        used = [0] * len(parameters)
        for number in self._own:
            loss, weight = 0.0, 0.0
            for parameter in parameters:
                parameter.grad = None
            if self._live is not None:
                self._live.look()
            if number in by_number:
                loss, weight = self._run_shard(by_number[number], loss_of)
                buffers.take(weight)
            else:
                buffers.skip()
            used = [count + (parameter.grad is not None) for count, parameter in zip(used, parameters)]
            for flat in self._flats:
                flat.push(parameters, weight if self.shards > 1 else 1.0)
            for row, value in zip(told, (loss, weight, self._batches, check)):
                row[number] = value
        loss, weight, used, changed = self._tell(told, used, buffers)
        if changed:
            buffers.average(changed, self.shards, self._group, weight)
        means = [None] * len(parameters)
        for flat in self._flats:
            flat.land(parameters, weight if self.shards > 1 else 1.0, used, means)
        return means, loss

    def _run_shard(self, shard, loss_of):
        torch.default_generator.manual_seed(mix(mix(self.seed, self._batches, 0), shard.number, 0))
        with torch.enable_grad():
            loss = loss_of(shard.batch)
        loss, weight = loss if isinstance(loss, tuple) else (loss, shard.samples)
        weight = float(weight)
        if not 0 <= weight < float("inf"):
            raise ValueError(f"the weight of shard {shard.number} is {weight}; it must be a number of samples or tokens")
        if weight:
            loss.backward()
        return (loss.item() if weight else 0.0), weight

    def _tell(self, told, used, buffers):
        tail = torch.tensor([*sum(told, []), *used, *buffers.changed()], dtype=torch.float64)
        if self._group is not None:
            # Each number but the counts is one rank's alone, and counts are whole: the order does not matter.
            dist.all_reduce(tail, group=self._group)
        *told, used, changed = tail.split([self.shards] * len(told) + [len(used), len(buffers)])
        losses, weights, batches, checks = (row.tolist() for row in told)
        if len(set(batches)) > 1:
            raise RuntimeError(f"shards belong to different batches: {[int(batch) for batch in batches]}; have all ranks loaded the same state?")
        if len(set(checks)) > 1:
            raise RuntimeError(f"ranks began batch {self._batches} with different weights; all must load the same state, and step the same optimizer")
        weight = sum(weights)
        if not weight:
            raise ValueError("the batch has no samples")
        loss = sum(loss * own for loss, own in zip(losses, weights)) / weight
        return loss, weight, used.tolist(), changed.nonzero().flatten().tolist()


class _Flat:
    """The gradients of the parameters at ``places``, one after another in a row."""

    def __init__(self, parameters, places, dtype, shards, group):
        self._places = places
        self._sizes = [_numbers(parameters[place]).numel() for place in places]
        self.sums = Sums(shards, group, sum(self._sizes), dtype)

    def push(self, parameters, weight):
        """Takes the gradients of a shard."""
        row = self.sums.row()
        filled, grads = [], []
        for place, part in zip(self._places, row[: sum(self._sizes)].split(self._sizes)):
            grad = parameters[place].grad
            if grad is None:
                part.zero_()
                continue
            if grad.layout is not torch.strided:
                raise TypeError(f"a gradient is {grad.layout}, as with sparse=True of an embedding; SameBits adds dense ones")
            grad = _numbers(grad)
            filled.append(part.view(grad.shape))
            grads.append(grad)
        if grads:
            torch._foreach_copy_(filled, grads)
        if weight != 1:
            row.mul_(weight)
        self.sums.push()

    def land(self, parameters, weight, used, means):
        """Puts the mean gradients in their places in ``means``."""
        row = self.sums.total()
        for place, part in zip(self._places, row[: sum(self._sizes)].split(self._sizes)):
            if used[place]:
                parameter = parameters[place]
                mean = torch.empty_like(parameter, requires_grad=False) if parameter.grad is None else parameter.grad
                numbers = _numbers(mean)
                torch.div(part.view(numbers.shape), weight, out=numbers)
                means[place] = mean


def _numbers(tensor):
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _dtype_of_sums(dtype):
    """Half precision is added in float32 and rounded once."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
