"""What is sent: stable ids, their text, and stop strings, whatever the pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import write_tokenizer
from toy import unchecked
from trace_toys import settled_target

from spot_dlm.decode import decode_steps, generate
from spot_dlm.drafters import Chain, Root
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rules import parse_rule
from spot_dlm.server.jobs import Sample
from spot_dlm.server.stops import StopFilter
from spot_dlm.server.track import Track
from spot_dlm.stable import StableIds, TextStream
from spot_dlm.targets.text import TextCodec
from spot_dlm.transition import Sampling

PIECES = st.lists(st.text("ab\n", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


@given(pieces=PIECES, stops=STOPS)
def test_stop_strings_however_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    """By definition: the match that ends first, of those the one that begins first; nothing that may be part of one is sent."""
    text, filter_ = "".join(pieces), StopFilter(stops)
    ends = [(i, i - len(s)) for s in stops for i in range(len(s), len(text) + 1) if text[:i].endswith(s)]
    expected = text[: min(ends)[1]] if ends else text
    sent = ""
    for piece in pieces:
        sent += filter_.feed(piece)
        assert expected.startswith(sent)
    assert filter_.is_stopped == bool(ends) and sent + filter_.end() == expected
    assert filter_.feed("more") == "" or not ends


def test_what_can_be_no_stop_string_is_sent_at_once() -> None:
    stops = StopFilter(["\n\nUser:"])
    assert [stops.feed(t) for t in ("a\n", "b", "\n\nUs", "e", "d\n\n", "User:", "x")] == ["a", "\nb", "", "", "\n\nUsed", "", ""]
    assert stops.is_stopped and stops.end() == ""


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("codec")
    write_tokenizer(folder)
    return TextCodec.read(folder)


@given(text=st.text(max_size=30))
def test_text_of_tokens_one_by_one(codec: TextCodec, text: str) -> None:
    """Characters of several bytes, which are several tokens here, come whole."""
    ids = codec.encode_bare(text)
    stream = TextStream(codec.decode)
    pieces = [stream.push(i) for i in ids]
    assert all("\N{REPLACEMENT CHARACTER}" not in p for p in pieces) or "\N{REPLACEMENT CHARACTER}" in text
    assert "".join(pieces) + stream.end() == text


@given(ids=st.lists(st.integers(0, 265), max_size=80))
def test_text_of_tokens_that_are_no_characters(codec: TextCodec, ids: list[int]) -> None:
    """Pieces of characters, special tokens and long runs of them: nothing is lost but the grouping of broken bytes."""
    stream = TextStream(codec.decode)
    text = "".join(map(stream.push, ids)) + stream.end()
    whole = codec.decode(ids)
    assert text.replace("\N{REPLACEMENT CHARACTER}", "") == whole.replace("\N{REPLACEMENT CHARACTER}", "")
    if len(ids) < 32:
        assert text == whole


@pytest.mark.parametrize("rule", ["standard", "k=3", "ltr", "threshold=0.4"])
def test_a_track_gives_the_result_of_its_sample(rule: str) -> None:
    """Whatever passes brought: text, ids, steps, and the token that completes a stop string."""
    target = settled_target(jitter=1.5, crosses=True)
    for seed in range(6):
        prompt = np.random.default_rng(seed).integers(1, 20, 1 + 5 * seed).tolist()
        params = DecodeParams(parse_rule(rule), Sampling(1.0, seed=seed), max_new_tokens=21, nodes=1, stop="prefix")
        with unchecked():
            whole = generate(target, prompt, Root(), params)
        stops = ("zz", whole.text[7:9]) if seed % 2 and len(whole.text) > 9 else ()
        ids = len(whole.token_ids)
        if stops:
            ids = next(n for n in range(1, ids + 1) if any(s in target.decode(whole.token_ids[:n]) for s in stops))
        for drafter, nodes in ((Root(), 1), (Chain(), 9)):
            track, run, text, stable = Track(target, Sample(prompt, params, stops, True)), StableIds({0}, 21), "", []
            with unchecked():
                for event in decode_steps(target, prompt, drafter, DecodeParams(**vars(params) | {"nodes": nodes})):
                    stable += run.take(event)
                    if track.ended is None:
                        text += track.take(event)
            assert stable == [i for i in whole.token_ids if i]
            assert track.ended.token_ids == whole.token_ids[:ids] and track.ended.commit_steps == whole.commit_steps[:ids]
            assert track.ended.num_tokens == ids and track.ended.finish_reason == ("stop" if stops else whole.finish_reason)
            assert text == (whole.text if not stops else min((whole.text.partition(s)[0] for s in stops), key=len))
