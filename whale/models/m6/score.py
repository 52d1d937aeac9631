"""How likely a trained model finds a text for a picture: what cross-modal search ranks by.

Place in the flow: after training; on one device, with the plain model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from whale.models.m6.generate import ROWS_AT_ONCE, evaluating
from whale.models.m6.mixture import check_belong
from whale.models.m6.model import IGNORED, M6
from whale.models.m6.objectives import Example, caption, collate
from whale.models.m6.pictures import Pixels
from whale.models.m6.tokenizer import Tokenizer


def log_likelihood(
    model: M6, tokenizer: Tokenizer, examples: Sequence[Example]
) -> tuple[Tensor, Tensor]:
    """Of each example's target: the sum over its tokens [count], and their number [count]."""
    check_belong(model.config, tokenizer, None)
    device = next(model.parameters()).device
    sums, counts = [torch.empty(0)], [torch.empty(0, dtype=torch.long)]
    for first in range(0, len(examples), ROWS_AT_ONCE):
        rows = examples[first : first + ROWS_AT_ONCE]
        length = max(len(row.source) + len(row.target) for row in rows)
        batch = collate(model.config, tokenizer, rows, length)
        labels = batch.pop("labels").to(device)
        with evaluating(model):
            out = model(**{name: x.to(device) for name, x in batch.items()})
            each = F.cross_entropy(
                out["logits"].float().flatten(0, 1),
                labels.flatten(),
                ignore_index=IGNORED,
                reduction="none",
            )
        sums.append(-each.view(labels.shape).sum(1).cpu())
        counts.append((labels != IGNORED).sum(1).cpu())
    return torch.cat(sums), torch.cat(counts)


def score(
    model: M6,
    tokenizer: Tokenizer,
    images: Sequence[Pixels],
    texts: Sequence[str],
    lang: str = "en",
    *,
    relative: bool = False,
) -> Tensor:
    """How well each pair of picture and text go together [count]: mean log-likelihood per token.

    To rank texts for a picture, pass it once per text, and the other way round.

    Args:
        model: a plain M6, on any device.
        tokenizer: of the same model.
        images: one per pair.
        texts: one per pair.
        lang: of the texts.
        relative: less what the text has without any picture. Ranking texts, this keeps common ones
            from winning everywhere; ranking pictures for one text, it changes nothing.
    """
    limit = model.config.max_text_len
    pairs = [
        caption(tokenizer, image, text, lang, limit=limit)
        for image, text in zip(images, texts, strict=True)
    ]
    sums, counts = log_likelihood(model, tokenizer, pairs)
    if relative:
        # A text is compared with itself: once is enough however many pictures it is paired with.
        different = list(dict.fromkeys(texts))
        alone = [caption(tokenizer, None, text, lang, limit=limit) for text in different]
        prior, _ = log_likelihood(model, tokenizer, alone)
        at = {text: i for i, text in enumerate(different)}
        sums = sums - prior[torch.tensor([at[text] for text in texts], dtype=torch.long)]
    return sums / counts
