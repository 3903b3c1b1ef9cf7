"""What an offer says of its buckets, and which channel is taken for which engines."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights.drawn_tensors import tensors

from gruppetto.errors import RunError, UserError
from gruppetto.weights.buckets import plan_buckets
from gruppetto.weights.channels.base import Offer, host_id, places_of, plans_of
from gruppetto.weights.channels.choose import Asked, make, within
from gruppetto.weights.channels.reach import Chosen, Reach, address_towards, decide
from gruppetto.weights.inprocess import InProcessChannel
from gruppetto.weights.layouts.tensors import specs_of
from gruppetto.weights.publish import PublishSettings, TwoPhase


def test_places_are_the_plan_again():
    plans = plan_buckets(specs_of(tensors(14)), 20_000, groups=())
    assert plans_of(places_of(plans)) == plans


@pytest.mark.parametrize("change", [{"bucket": 7}, {"offset": -1}, {"shape": (-1, 2)}, {"dtype": "object"}])
def test_places_that_are_no_plan_are_refused(change):
    from dataclasses import replace

    places = list(places_of(plan_buckets(specs_of(tensors()), 20_000, groups=())))
    places[0] = replace(places[0], **change)
    with pytest.raises((RunError, UserError)):
        plans_of(places)


# --- choice ----------------------------------------------------------------------------------------------------------


def test_auto_takes_what_is_there_in_this_process(tmp_path):
    asked = Asked(folder=tmp_path)
    assert isinstance(make(within("auto", "full"), asked), InProcessChannel)
    assert isinstance(make(Chosen(way="staged", why=""), asked), InProcessChannel)
    for chosen in (within("auto", "delta"), within("disk", "full"), within("gloo", "delta")):
        assert isinstance(make(chosen, asked), TwoPhase)
    with pytest.raises(UserError, match=r"write weights\.channel"):
        within("inprocess", "delta")
    with pytest.raises(UserError, match="needs a folder"):
        PublishSettings(channel="disk")


HERE, OTHER = "boot mnt", "other mnt"
REACHES = st.lists(
    st.builds(Reach, engine=st.just("e"), url=st.just("http://h:1"), lacks=st.sampled_from(["", "has no route"]),
              host=st.sampled_from([HERE, OTHER, ""])),
    min_size=1, max_size=4,
)  # fmt: skip


@given(st.sampled_from(["auto", "inprocess", "shm", "disk", "gloo"]), st.sampled_from(["full", "delta"]), REACHES)
def test_every_server_can_take_what_is_chosen_and_what_cannot_be_is_one_line(channel, mode, reaches):
    try:
        chosen, said = decide(channel, mode, reaches, HERE), ""
    except UserError as error:
        chosen, said = None, str(error)
    if chosen is None:
        assert channel != "auto" or mode == "delta"
        assert "\n" not in said
        assert "write weights." in said
        assert said.startswith(("weights.channel = ", "weights.mode = "))
        return
    assert chosen.why
    assert chosen.way == channel or channel == "auto" or (channel, chosen.way) == ("disk", "staged")
    lacking = any(reach.lacks for reach in reaches)
    assert lacking == (chosen.way == "staged")
    assert chosen.channel in (channel, "shm", "gloo", "disk")  # the record's word is one that a config may have
    assert channel == "auto" or chosen.channel == channel
    assert not lacking or mode == "full"
    if chosen.way == "shm":
        assert all(reach.host == HERE for reach in reaches)


def test_shared_memory_is_never_taken_where_the_host_cannot_be_told():
    assert decide("auto", "full", [Reach(engine="e", url="http://h:1", host="")], "").way == "gloo"


def test_the_address_towards_a_server_here_is_loopback():
    assert address_towards(["http://127.0.0.1:30000", "http://localhost"]) == "127.0.0.1"


def test_this_process_and_one_like_it_see_one_host():
    command = "from gruppetto.weights.channels.base import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id() != ""


def test_an_offer_travels_as_json():
    import msgspec

    places = places_of(plan_buckets(specs_of(tensors()), 20_000, groups=()))
    offer = Offer(version=3, kind="full", channel="shm", address={"path": "/x", "rank": 1}, places=places)
    assert msgspec.json.decode(msgspec.json.encode(offer), type=Offer) == offer
