"""`whale generate CKPT`: a trained M6 captions, answers, writes and draws.

Place in the flow: after `whale train`; a front of `whale.models.m6.generate`, on one device. What
was written goes to standard output and nothing else does.
"""

from __future__ import annotations

import argparse

import torch

from whale.cli.files import check_target
from whale.errors import ConfigError
from whale.models.m6 import generate
from whale.models.m6.generate import Sampling
from whale.models.m6.trained import Trained
from whale.training.folder import load_trained
from whale.training.png import find_picture, write_png

LANGUAGES = ("en", "zh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", metavar="CKPT", help="the folder of a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--image", metavar="F", help="caption a picture: a file, or an emoji such as 🐶/twemoji"
    )
    what.add_argument("--text", metavar="T", help="go on with a text")
    what.add_argument("--draw", metavar="T", help="draw what a text names")
    parser.add_argument("--ask", metavar="T", help="with --image: answer a question about it")
    parser.add_argument("--out", metavar="F.png", help="with --draw: the file to write")
    parser.add_argument(
        "--lang", default="en", metavar="L", help="language to write in: en (default) or zh"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 takes the most likely, 1 draws by probability (default 0; with --text 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K most likely")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    parser.add_argument(
        "--guidance",
        type=float,
        default=1.0,
        metavar="X",
        help="with --draw: above 1 keeps closer to the text (default 1)",
    )
    parser.add_argument(
        "--length", type=int, default=64, metavar="N", help="tokens to write at most (default 64)"
    )


def run(args: argparse.Namespace) -> int:
    """Write or draw one thing."""
    _check(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = load_trained(args.checkpoint, device)
    temperature = args.temperature
    if temperature is None:
        temperature = 0.8 if args.text is not None else 0.0
    sampling = Sampling(temperature=temperature, top_k=args.top_k, seed=args.seed)
    if args.draw is not None:
        _draw(args, trained, sampling)
    elif args.text is not None:
        (more,) = generate.continue_text(
            trained.model,
            trained.tokenizer,
            [args.text],
            args.lang,
            max_new=args.length,
            sampling=sampling,
        )
        print(f"{args.text}{more}")
    else:
        print(_told(args, trained, sampling))
    return 0


def _check(args: argparse.Namespace) -> None:
    for flag, needed in (("ask", "image"), ("out", "draw")):
        if getattr(args, flag) is not None and getattr(args, needed) is None:
            raise ConfigError(
                f"--{flag} without --{needed}", hint=f"--{flag} goes with --{needed} only"
            )
    if args.draw is not None and args.out is None:
        raise ConfigError("--draw without --out", hint="name the picture's file: --out F.png")
    if args.lang not in LANGUAGES:
        raise ConfigError(f"--lang {args.lang!r}", hint=f"allowed: {', '.join(LANGUAGES)}")
    if args.length < 1:
        raise ConfigError(f"--length {args.length}", hint="allowed: 1 or more")
    check_target("--out", args.out)


def _told(args: argparse.Namespace, trained: Trained, sampling: Sampling) -> str:
    model, tokenizer = trained.model, trained.tokenizer
    image = find_picture(args.image, model.config.image_size)
    if args.ask is None:
        (text,) = generate.caption(
            model, tokenizer, [image], args.lang, max_new=args.length, sampling=sampling
        )
    else:
        (text,) = generate.answer(
            model, tokenizer, [image], [args.ask], max_new=args.length, sampling=sampling
        )
    return text


def _draw(args: argparse.Namespace, trained: Trained, sampling: Sampling) -> None:
    if trained.codes is None:
        raise ConfigError(
            f"--draw: the model of {args.checkpoint} has no image codes: it never learned to draw",
            hint="train with an objective `draw` above 0",
        )
    pictures = generate.draw(
        trained.model,
        trained.tokenizer,
        trained.codes,
        [args.draw],
        sampling=sampling,
        guidance=args.guidance,
    )
    write_png(args.out, pictures[0])
    print(args.out)
