"""What generated requests have found, one case each."""


def test_returning_to_the_default_limits_leaves_nothing_behind(server):
    """Each tenant that was named in a DELETE took one of 1,024 places for ever; then every PUT was refused."""
    for i in range(1030):
        assert server.request("DELETE", f"/admin/quotas/tenant-{i}", admin=True)[0] == 200
    for i in range(3):
        status, reply, _ = server.request("PUT", f"/admin/quotas/kept-{i}", {"entries": i + 1}, admin=True)
        assert (status, reply["entries"]) == (200, i + 1)
    assert server.request("DELETE", "/admin/quotas/kept-0", admin=True)[1]["entries"] == 65536
    assert server.get("/admin/quotas/kept-2", admin=True)[1]["entries"] == 3
    assert server.get("/admin/quotas/kept-1", admin=True)[1]["entries"] == 2


def test_an_estimate_reads_the_fields_of_its_kind_alone(server):
    """Fields of the other kind were accepted unread, whatever they held."""
    for body in ({"tokens": 5, "loops_used": "many"}, {"tokens": 5, "kind": "pool_entry", "max_loops": 65},
                 {"tokens": 5, "kind": "resume_handle", "loops": 2}):
        status, reply, _ = server.request("POST", "/v1/estimate", body)
        assert (status, reply["error"]["code"]) == (400, "unknown_field"), body


def test_top_logprobs_are_judged_also_without_logprobs(server):
    for value, code in ((21, "out_of_range"), ("many", "invalid_type")):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "the"}], "max_tokens": 1, "top_logprobs": value}
        status, reply, _ = server.request("POST", "/v1/chat/completions", body)
        assert (status, reply["error"]["code"]) == (400, code)
