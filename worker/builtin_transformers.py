"""Text models of the `transformers` library that need no code: classification and embeddings.

    [models.mood]                                        # pip install 'gpusup[transformers]'
    handler = "gpusup.worker.builtin_transformers:TextClassification"
    weights = "distilbert-{version}"                     # a folder as save_pretrained writes it

    [models.vectors]
    handler = "gpusup.worker.builtin_transformers:Embeddings"
    weights = "minilm"
    settings = { pooling = "mean", normalize = true }    # or pooling = "cls"

A request is the text itself (`text/plain`), or JSON `"text"` or `{"text": "..."}`. Nothing is ever
fetched from a hub: the folder must be complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from .loader import PRECISIONS
from .model import ConfigProblem, InvalidInput, Model, Request

#: Token counts that texts are padded to: few shapes, so that batches form and graphs pay.
LENGTHS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class _Text(Model):
    """Tokens as (2, length): the ids, and the mask that says which of them are real."""

    auto_class = "AutoModel"

    def load(self, device: torch.device, version: str) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigProblem(
                "needs the transformers library: pip install 'gpusup[transformers]'"
            ) from error
        folder = Path(self.weights)
        if not self.weights or not folder.is_dir():
            raise ConfigProblem(f"weights: expected a folder with a model, got {self.weights!r}")
        kind = PRECISIONS.get(self.dtype)
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True
            )
            net = getattr(transformers, self.auto_class).from_pretrained(
                str(folder), local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().splitlines()[:1]
            raise ConfigProblem(f"cannot load {folder}: {first[0] if first else error}") from error
        self.net = net.to(device, kind).eval().requires_grad_(False)
        self.device = device
        limits = (
            int(self.settings.get("tokens", 0)) or 2**31,
            int(getattr(net.config, "max_position_embeddings", 0) or 2**31),
            int(self.tokenizer.model_max_length),
        )
        self.limit = min(min(limits), LENGTHS[-1])
        self.truncate = bool(self.settings.get("truncate", True))
        self.pad = self.tokenizer.pad_token_id or 0

    def state_dict(self) -> Mapping[str, torch.Tensor] | None:
        return dict(self.net.state_dict())

    def decode(self, request: Request) -> torch.Tensor:
        return self.tokens(text_of(request))

    def tokens(self, text: str) -> torch.Tensor:
        """(2, length) int64. Raises InvalidInput on a text with too many tokens."""
        ids = self.tokenizer(text, truncation=self.truncate, max_length=self.limit)["input_ids"]
        if len(ids) > self.limit:
            raise InvalidInput(f"the text has {len(ids)} tokens, at most {self.limit} are allowed")
        length = min((n for n in LENGTHS if n >= len(ids)), default=len(ids))
        length = min(length, self.limit)
        both = torch.zeros(2, length, dtype=torch.int64)
        both[0].fill_(self.pad)
        both[0, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        both[1, : len(ids)] = 1
        return both

    def run(self, batch: torch.Tensor) -> Any:
        return self.net(input_ids=batch[:, 0], attention_mask=batch[:, 1])

    def warm_up(self) -> Sequence[torch.Tensor]:
        examples = []
        for length in LENGTHS:
            if length <= min(self.limit, 128):
                both = torch.full((2, length), self.pad, dtype=torch.int64)
                both[1] = 1
                examples.append(both)
        return examples


class TextClassification(_Text):
    """`{"label", "probability", "scores": {label: probability}}`."""

    auto_class = "AutoModelForSequenceClassification"

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.run(batch).logits.float(), dim=1)

    def encode(self, row: torch.Tensor, request: Request) -> dict[str, Any]:
        names = self.net.config.id2label
        scores = {str(names.get(i, i)): round(float(p), 6) for i, p in enumerate(row)}
        best = max(scores, key=lambda name: scores[name])
        return {"label": best, "probability": scores[best], "scores": scores}


class Embeddings(_Text):
    """`{"embedding": [...]}`; also under /v1/embeddings."""

    def load(self, device: torch.device, version: str) -> None:
        super().load(device, version)
        self.pooling = str(self.settings.get("pooling", "mean"))
        if self.pooling not in ("mean", "cls"):
            raise ConfigProblem(f'settings.pooling: expected "mean" or "cls", got "{self.pooling}"')
        self.normalize = bool(self.settings.get("normalize", True))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.run(batch).last_hidden_state.float()
        if self.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            mask = batch[:, 1].unsqueeze(-1).to(hidden.dtype)
            vectors = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(vectors, dim=1) if self.normalize else vectors

    def encode(self, row: torch.Tensor, request: Request) -> dict[str, Any]:
        return {"embedding": row.tolist()}

    def embed(self, texts: Sequence[str], params: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """(len(texts), size) float32. Texts of like length share a pass."""
        tokens = [self.tokens(text) for text in texts]
        vectors: list[torch.Tensor | None] = [None] * len(tokens)
        for length in sorted({both.shape[1] for both in tokens}):
            chosen = [i for i, both in enumerate(tokens) if both.shape[1] == length]
            for first in range(0, len(chosen), 32):
                some = chosen[first : first + 32]
                batch = torch.stack([tokens[i] for i in some]).to(self.device)
                with torch.inference_mode():
                    rows = self.forward(batch).cpu()
                for i, row in zip(some, rows, strict=True):
                    vectors[i] = row
        return torch.stack([v for v in vectors if v is not None]).numpy()  # type: ignore[no-any-return]


def text_of(request: Request) -> str:
    """The text of a request in any of its forms. Raises InvalidInput."""
    said = request.json
    if isinstance(said, Mapping):
        said = said.get("text", said.get("inputs"))
    if said is None and request.body and request.json is None:
        try:
            said = request.body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInput(f"the text is not UTF-8: byte {error.start}") from error
    if not isinstance(said, str):
        raise InvalidInput('expected a text: text/plain, or JSON {"text": "..."}')
    if not said.strip():
        raise InvalidInput("the text is empty")
    return said
