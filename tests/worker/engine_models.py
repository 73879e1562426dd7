"""Handlers for the tests of the engine, as text: each test has a module of its own."""

from __future__ import annotations

MODELS = '''
import threading, time
import torch
from gpusup.worker.model import Model, Tensor, InvalidInput, Response

class Base(Model):
    inputs = (Tensor("x", "FP32", (-1,)),)
    outputs = (Tensor("y", "FP32", (-1,)),)

class Picky(Base):
    """Fails a batch that has 13 in it; remembers how many rows each batch had."""
    seen = []
    def forward(self, batch):
        Picky.seen.append(tuple(batch.shape))
        if (batch == 13).any():
            raise RuntimeError("unlucky\\n  File secret.py")
        return batch + 1

class Gate(Base):
    """Computes only while the gate is open."""
    gate = threading.Event()
    entered = threading.Event()
    rows = []
    def forward(self, batch):
        Gate.entered.set()
        assert Gate.gate.wait(20)
        Gate.rows.append(int(batch.shape[0]))
        return batch
    def warm_up(self):
        Gate.gate.set()
        return [torch.zeros(1)]

class Hungry(Base):
    """More than `fits` rows at once do not fit."""
    rows = []
    def forward(self, batch):
        n = int(batch.shape[0])
        Hungry.rows.append(n)
        if n > self.settings["fits"] or (batch == 666).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        return batch * 2

class Two(Model):
    inputs = (Tensor("a", "FP32", (2,)), Tensor("b", "FP32", (2,)))
    outputs = (Tensor("sum", "FP32", (2,)), Tensor("diff", "FP32", (2,)))
    def forward(self, batch):
        return batch["a"] + batch["b"], batch["a"] - batch["b"]

class BadEncode(Base):
    def decode(self, request):
        if request.json == "bad":
            raise InvalidInput("bad is not a number")
        if request.json == "bug":
            raise KeyError("bug")
        return torch.tensor([float(request.json)])
    def forward(self, batch):
        return batch
    def encode(self, row, request):
        if row[0] == 1:
            return float("nan")
        if row[0] == 2:
            return object()
        if row[0] == 3:
            return None
        if row[0] == 4:
            return Response(b"four", "text/x")
        return row

class BadBucket(Base):
    def bucket_of(self, item):
        if float(item[0]) == 13:
            raise KeyError("bucket")
        return ""
    def forward(self, batch):
        return batch

class Raw(Model):
    """No decode: opaque bytes of the declared size are the tensor."""
    inputs = (Tensor("image", "UINT8", (2, 2)),)
    def forward(self, batch):
        return batch.sum((1, 2))
    def encode(self, row, request):
        return {"sum": int(row)}

class Mean(Base):
    """What padding must not change."""
    def forward(self, batch, sizes):
        assert sizes.shape == (batch.shape[0], 1)
        return batch.sum(1, keepdim=True) / sizes, batch * 1
'''
