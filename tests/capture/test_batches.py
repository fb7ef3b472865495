# SPDX-License-Identifier: Apache-2.0
"""Fetched batches are served again; the loader sees the same calls in the same order."""

import dataclasses
import threading
from collections import UserDict

import pytest
import torch

from megatron_ttrace.capture.batches import Served, tensors_of
from megatron_ttrace.trace.errors import TTraceError


class Wrapper:
    """Megatron's ``RerunDataIterator``."""

    def __init__(self, iterable):
        self.iterable = iterable

    def __next__(self):
        return next(self.iterable)


def loader(asked, count=9):
    """Counts what is fetched of it."""
    for number in range(count):
        asked.append(number)
        yield {"tokens": torch.full((2,), number), "note": "text"}


def taken(iterator, count):
    """The tokens of the next batches."""
    return [int(next(iterator)["tokens"][0]) for _ in range(count)]


def test_batches_are_fetched_and_served_again():
    """Before the step, during it, and what follows afterwards."""
    asked = []
    iterator = Wrapper(loader(asked))
    served = Served(iterator, 3)
    assert asked == [0, 1, 2]
    assert [int(b["tokens"][0]) for b in served.batches] == [0, 1, 2]
    assert set(served.batches[0]) == {"tokens"}
    served.serve()
    assert taken(iterator, 3) == [0, 1, 2]
    served.serve()
    assert taken(iterator, 5) == [0, 1, 2, 3, 4]
    assert asked == [0, 1, 2, 3, 4]


def test_an_iterator_that_cannot_be_read_twice():
    """Nothing of it is read."""
    asked = []
    with pytest.raises(TTraceError, match="own data iterator"):
        Served([None, Wrapper(loader(asked)), loader(asked)], 1)
    assert not asked


def test_fetching_without_serving_skips():
    """Batches of steps that are not traced are fetched and left."""
    iterator = Wrapper(loader([]))
    Served(iterator, 2)
    assert taken(iterator, 1) == [2]


class Encoding(UserDict):
    """A batch with a method of its own, as those of Hugging Face's tokenizers."""

    def to(self, dtype):
        return {name: value.to(dtype) for name, value in self.items()}


@dataclasses.dataclass
class Sample:
    """A batch that is no mapping."""

    tokens: torch.Tensor


def test_what_is_handed_out_is_a_copy():
    """Megatron may replace values in the dict that it is given, others write into tensors."""
    iterator = Wrapper(loader([]))
    served = Served(iterator, 1)
    served.serve()
    next(iterator)["tokens"] = None
    served.serve()
    next(iterator)["tokens"].add_(1)
    served.serve()
    assert next(iterator)["tokens"].tolist() == [0, 0]
    assert served.batches[0]["tokens"].tolist() == [0, 0]


@pytest.mark.parametrize("kind", [Encoding, lambda batch: Sample(batch["tokens"]), list, tuple])
def test_a_batch_keeps_its_type(kind):
    """What the training script calls on it is still there."""
    item = kind({"tokens": torch.zeros(2)})
    iterator = Wrapper(iter([item]))
    served = Served(iterator, 1)
    served.serve()
    found = next(iterator)
    assert type(found) is type(item)
    assert found is not item or kind is tuple


def test_batches_may_be_changed_on_the_way():
    """The change concerns the served ones only, each time anew."""
    iterator = Wrapper(loader([]))
    served = Served(iterator, 2)
    served.serve(lambda item: {**item, "tokens": item["tokens"] + 100})
    assert taken(iterator, 3) == [100, 101, 102]
    served.serve()
    assert taken(iterator, 1) == [0]
    assert int(served.batches[0]["tokens"][0]) == 0


def test_one_iterator_per_chunk():
    """Virtual pipeline: each chunk's own iterator is fetched and served."""
    asked = [], []
    iterators = [Wrapper(loader(a)) for a in asked]
    served = Served(iterators, 2)
    served.serve()
    assert asked == ([0, 1], [0, 1])
    assert [taken(iterator, 2) for iterator in iterators] == [[0, 1], [0, 1]]
    assert len(served.batches) == 2


def test_a_rank_without_data():
    """The middle of a pipeline has no iterator, or a list of none."""
    for nothing in (None, [None, None]):
        served = Served(nothing, 3)
        served.serve()
        assert served.batches == []


def test_items_of_any_form():
    """Dicts, tuples and single tensors; what is no tensor is left out."""
    one = torch.ones(1)
    assert tensors_of({"a": one, "b": 3}) == {"a": one}
    assert tensors_of((one, None, one)) == {"0": one, "2": one}
    assert tensors_of([3]) == {}
    assert tensors_of(one) == {"0": one}
    assert tensors_of(None) == {}


def test_what_cannot_be_copied_is_served_as_it_is():
    """A batch may hold a lock, or a file; values in it can be replaced all the same."""
    held = threading.Lock()
    iterator = Wrapper(iter([{"tokens": torch.zeros(2), "lock": held}]))
    served = Served(iterator, 1)
    served.serve()
    batch = next(iterator)
    assert batch["lock"] is held
    batch["tokens"] = None
    served.serve()
    assert next(iterator)["tokens"] is not None


def test_a_loader_that_fails_loses_nothing():
    """What was fetched before it raised is what training gets next."""

    class Flaky:
        """Raises once, at the third batch."""

        def __init__(self):
            self.source, self.asked = loader([]), 0

        def __iter__(self):
            return self

        def __next__(self):
            self.asked += 1
            if self.asked == 3:
                raise OSError("lost for a moment")
            return next(self.source)

    iterator = Wrapper(Flaky())
    with pytest.raises(OSError, match="moment"):
        Served(iterator, 4)
    assert taken(iterator, 4) == [0, 1, 2, 3]


def test_a_loader_that_ends():
    """It is said by how much; training gets what there was."""
    iterator = Wrapper(loader([], count=2))
    with pytest.raises(TTraceError, match="ends after 2 of the 4 microbatches"):
        Served(iterator, 4)
    assert taken(iterator, 2) == [0, 1]


def test_a_script_that_reads_further():
    """What a rehearsal takes beyond its microbatches comes again; training reads it once."""
    asked = []
    iterator = Wrapper(loader(asked))
    served = Served(iterator, 2)
    for _ in range(2):
        served.serve(in_rehearsal=True)
        assert taken(iterator, 4) == [0, 1, 2, 3]
    served.serve()
    assert taken(iterator, 6) == [0, 1, 2, 3, 4, 5]
    assert asked == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("end", [None, OSError("gone")])
def test_batches_that_follow(end):
    """Each is the one after it, or again the last; training loses none, nor an error."""

    def ending():
        yield from loader([], count=3)
        if end:
            raise end

    iterator = Wrapper(ending())
    served = Served(iterator, 2)
    served.serve(in_rehearsal=True, later=True)
    assert taken(iterator, 4) == [1, 2, 2, 2]
    served.serve()
    assert taken(iterator, 3) == [0, 1, 2]
    with pytest.raises(type(end) if end else StopIteration):
        next(iterator)
