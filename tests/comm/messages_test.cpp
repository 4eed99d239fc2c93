// The sentences of errors, made without a second process.
#include <string>
#include <vector>

#include "lockstep/comm/gloo_call.hpp"
#include "lockstep/comm/shape_check.hpp"
#include "support/catch.hpp"

using lockstep::detail::Call;
using lockstep::detail::Position;

TEST_CASE("lateness names the late ranks and where they were") {
  const Call call{"all_reduce", 57, -1, 0, {}};
  const std::vector<int> ranks{0, 1, 2, 3};
  const Position here{57, "all_reduce"};
  CHECK(lateness(call, {{1, {56, "all_reduce"}}, {2, here}, {3, here}}, ranks, 0, "6 s") ==
        "rank 1 has not entered all_reduce #57 after 6 s; last at all_reduce #56");
  CHECK(
      lateness(call, {{1, {56, "all_reduce"}}, {2, {0, ""}}, {3, here}}, ranks, 0, "6 s") ==
      "ranks 1 and 2 have not entered all_reduce #57 after 6 s; last at all_reduce #56; rank 2 at the start");
  CHECK(lateness(call, {{1, here}, {3, here}}, ranks, 0, "6 s") ==
        "rank 2 has not said how far it is after 6 s of all_reduce #57: dead, stopped, or cut off");
  CHECK_THAT(lateness(call, {{1, here}, {2, here}, {3, here}}, ranks, 0, "6 s"),
             ContainsSubstring("although every rank has entered it"));
  CHECK(lateness(call, {{1, here}, {2, {57, "barrier"}}, {3, here}}, ranks, 0, "6 s") ==
        "all_reduce #57 is not complete after 6 s: rank 2 called barrier instead");
}

TEST_CASE("lateness of a message names its peer alone") {
  const Call call{"recv", 0, 1, 5, {}};
  CHECK(lateness(call, {{7, {3, "broadcast"}}}, {0, 7, 9}, 0, "250 ms") ==
        "recv from rank 1 (tag 5) is not complete after 250 ms: rank 7 is last at broadcast #3");
}

TEST_CASE("a mismatch names the first thing that differs") {
  const Call call{"all_reduce", 57, -1, 0, {}};
  const auto a = at::zeros({4}), b = at::zeros({8}), c = at::zeros({2, 3}, at::kLong);
  const auto text = [&](const std::vector<at::Tensor>& list) {
    return lockstep::detail::signature("all_reduce of sum", list);
  };
  CHECK(mismatch_text(call, {text({a}), text({b})}, {0, 1}) ==
        "all_reduce #57: rank 0 [4] float32, rank 1 [8] float32");
  CHECK(mismatch_text(call, {text({a, c}), text({a, c}), text({a, b})}, {0, 2, 5}) ==
        "all_reduce #57: tensor 1: rank 0 [2, 3] int64, rank 2 [2, 3] int64, rank 5 [8] float32");
  CHECK(mismatch_text(call, {text({a, c}), text({a})}, {0, 1}) ==
        "all_reduce #57: tensor 1: rank 0 [2, 3] int64, rank 1 nothing");
  CHECK(mismatch_text(call, {text({a}), lockstep::detail::signature("broadcast with root 1", {a})}, {0, 1}) ==
        "collective #57: rank 0 all_reduce of sum, rank 1 broadcast with root 1");
}

TEST_CASE("what Gloo says is cut to its sentence") {
  const auto words = [](const std::string& text) {
    return lockstep::detail::gloo_words(std::make_exception_ptr(std::runtime_error(text)));
  };
  CHECK(words("[/a/b/pair.cc:553] Connection closed by peer [127.0.0.1]:41. This is typically caused by "
              "x\nmore") == "Connection closed by peer [127.0.0.1]:41");
  CHECK(words("[./gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Reset") ==
        "Read error [127.0.0.1]:1: Reset");
  CHECK(words("[enforce fail at /a/b/pair.cc:446] op.preamble.length <= op.nbytes. 60 vs 20") ==
        "the ranks gave it tensors of different sizes (a part of 60 vs 20 bytes)");
  CHECK(words("[127.0.0.1]:1] is a peer") == "[127.0.0.1]:1] is a peer");
  CHECK(words("plain") == "plain");
}

TEST_CASE("durations read as people say them") {
  using namespace std::chrono_literals;
  CHECK(lockstep::detail::duration_text(250ms) == "250 ms");
  CHECK(lockstep::detail::duration_text(6s) == "6 s");
}

TEST_CASE("the status of a group pairs a number with its operation") {
  lockstep::detail::GroupStatus status;
  status.enter(1, "all_reduce");
  CHECK(status.text() == "1 all_reduce");
  status.enter(2, "barrier");
  CHECK(status.text() == "2 barrier");
}
