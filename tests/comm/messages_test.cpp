// The sentences of errors, and the messages between ranks that they are made of, without a second process.
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/call_watch.hpp"
#include "lockstep/comm/detail/group_status.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/world/detail/nccl_environment.hpp"
#include "support/catch.hpp"

namespace messages_test {

using lockstep::FailedCall;
using lockstep::detail::Call;
using lockstep::detail::GroupStatus;
using lockstep::detail::lateness;
using lockstep::detail::text_of;
using namespace std::chrono_literals;

namespace {
FailedCall at(std::uint64_t sequence, std::string operation, std::string served = {}, std::string part = {}) {
  return {.operation = std::move(operation),
          .sequence = sequence,
          .served = std::move(served),
          .part = std::move(part)};
}
}  // namespace

TEST_CASE("lateness names the late ranks and where they were") {
  const Call call{"all_reduce", 57, {}, 0, {}};
  const std::vector<int> ranks{0, 1, 2, 3};
  const FailedCall here = at(57, "all_reduce");
  CHECK(lateness(call.failed(), {{1, at(56, "all_reduce")}, {2, here}, {3, here}}, ranks, 0, "6 s") ==
        "rank 1 has not entered all_reduce #57 after 6 s; last at all_reduce #56");
  CHECK(
      lateness(call.failed(), {{1, at(56, "all_reduce")}, {2, at(0, "")}, {3, here}}, ranks, 0, "6 s") ==
      "ranks 1 and 2 have not entered all_reduce #57 after 6 s; last at all_reduce #56; rank 2 at the start");
  CHECK(lateness(call.failed(), {{1, here}, {3, here}}, ranks, 0, "6 s") ==
        "rank 2 has not reported a position after 6 s of all_reduce #57: dead, stopped or cut off");
  CHECK(lateness(call.failed(), {{1, here}, {2, here}, {3, here}}, ranks, 0, "6 s") ==
        "all_reduce #57 is not complete after 6 s although every rank has entered it: the network or a rank "
        "is too slow");
  CHECK(lateness(call.failed(), {{1, here}, {2, at(57, "barrier")}, {3, here}}, ranks, 0, "6 s") ==
        "all_reduce #57 is not complete after 6 s: rank 2 called barrier instead");
}

TEST_CASE("errors name the public calls of the ranks") {
  using lockstep::detail::CallScope;
  using lockstep::detail::served_call;
  const auto collective = [](const char* name) { return Call{name, 57, {}, 0, {}, served_call}; };
  CHECK(collective("barrier").text() == "barrier #57");
  const CallScope outer("Trainer::fit");
  CHECK(collective("barrier").text() == "barrier #57 of Trainer::fit");
  {
    const CallScope middle("evaluate"), inner("agree");
    CHECK(collective("barrier").text() == "barrier #57 of Trainer::fit (agree)");
    const CallScope callback(lockstep::detail::ServedCall{});
    CHECK(served_call.name == nullptr);
  }
  const Call call = collective("all_reduce");
  CHECK(lateness(call.failed(), {{1, at(56, "all_reduce", "Trainer::fit", "evaluate")}}, {0, 1}, 0, "6 s") ==
        "rank 1 has not entered all_reduce #57 of Trainer::fit after 6 s; last at all_reduce #56 of "
        "Trainer::fit (evaluate); every rank must call Trainer::fit");
  CHECK(lateness(call.failed(), {{1, at(57, "barrier", "evaluate")}}, {0, 1}, 0, "6 s") ==
        "all_reduce #57 of Trainer::fit is not complete after 6 s: rank 0 is in Trainer::fit, rank 1 in "
        "evaluate; call both on every rank, and equally often");
  CHECK(lateness(call.failed(), {{1, at(0, "nothing")}}, {0, 1}, 0, "6 s",
                 {{1, {"lockstep/comm/1", at(3, "barrier", "Trainer::evaluate", "agree")}}}) ==
        "rank 1 has not entered all_reduce #57 of Trainer::fit after 6 s; at the start; every rank must call "
        "Trainer::fit. Rank 1 has entered barrier #3 of Trainer::evaluate (agree) in the communicator "
        "'lockstep/comm/1', and rank 0 has not: every rank must make the calls of all communicators in the "
        "same order");
  CHECK(lateness(call.failed(), {{0, at(57, "barrier")}}, {0, 1}, 1, "6 s") ==
        "all_reduce #57 of Trainer::fit is not complete after 6 s: rank 0 is in a call of barrier, rank 1 in "
        "Trainer::fit; call both on every rank, and equally often");

  GroupStatus status("group", {0});
  status.enter("broadcast", served_call);
  CHECK(text_of(status.position()) == "broadcast #1 of Trainer::fit");
  CHECK(text_of(at(3, "broadcast", "Trainer::fit", "agree")) == "broadcast #3 of Trainer::fit (agree)");
  CHECK(text_of(at(3, "broadcast")) == "broadcast #3");
}

TEST_CASE("ranks in several calls are listed by call") {
  using lockstep::detail::different_calls;
  CHECK(different_calls({"a", "", "a"}, {0, 1, 2}).empty());
  CHECK(different_calls({"a", "b", "a", ""}, {0, 2, 5, 7}) ==
        "ranks 0 and 5 are in a, rank 2 in b; call both on every rank, and equally often");
  CHECK(different_calls({"a", "b", "c"}, {0, 1, 2}) ==
        "rank 0 is in a, rank 1 in b, rank 2 in c; call all of them on every rank, and equally often");
}

TEST_CASE("lateness of a message names its peer alone") {
  const Call call{"recv", 0, 1, 5, {}};
  CHECK(lateness(call.failed(), {{7, at(3, "broadcast")}}, {0, 7, 9}, 0, "250 ms") ==
        "recv from rank 1 (tag 5) is not complete after 250 ms: rank 7 is last at broadcast #3");
}

TEST_CASE("what Gloo says is cut to its sentence") {
  const auto words = [](const std::string& text) { return lockstep::detail::classify(text).text; };
  CHECK(words("[/a/b/pair.cc:553] Connection closed by peer [127.0.0.1]:41. This is typically caused by "
              "x\nmore") == "Connection closed by peer [127.0.0.1]:41");
  CHECK(words("[./gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Reset") ==
        "Read error [127.0.0.1]:1: Reset");
  for (const std::string more :
       {"", ". Received data size doesn't match expected size. Is there a mismatch?"})
    CHECK(words("[enforce fail at /a/b/pair.cc:446] op.preamble.length <= op.nbytes. 60 vs 20" + more) ==
          "the ranks gave it tensors of different sizes (a part of 60 vs 20 bytes)");
  CHECK(lockstep::detail::classify("[enforce fail at p.cc:4] op.nbytes. 60 vs 20").kind ==
        lockstep::detail::ForeignError::other_sizes);
  CHECK(words("[127.0.0.1]:1] is a peer") == "[127.0.0.1]:1] is a peer");
  CHECK(words("plain") == "plain");
}

TEST_CASE("the environment of NCCL is told where LibTorch may end the process") {
  using Values = std::map<std::string, std::string>;
  const auto warning = [](const Values& values) {
    return lockstep::detail::nccl_environment_warning([&](const char* name) -> std::optional<std::string> {
      const auto found = values.find(name);
      return found == values.end() ? std::nullopt : std::optional(found->second);
    });
  };
  Values values{{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"},
                {"TORCH_NCCL_ENABLE_MONITORING", "0"},
                {"TORCH_NCCL_DUMP_ON_TIMEOUT", "1"},  // a dump ends nothing
                {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0"}};
  CHECK(warning(values).empty());
  values["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3";
  values.erase("TORCH_NCCL_ENABLE_MONITORING");
  CHECK(warning(values) ==
        "LibTorch may end this process when a collective of NCCL fails or times out, before lockstep can "
        "name the rank: set TORCH_NCCL_ASYNC_ERROR_HANDLING=2 TORCH_NCCL_ENABLE_MONITORING=0 before the "
        "program starts, as lockstep::launch sets those that are unset");
}

TEST_CASE("the status of a group that is entered meanwhile is one of its pairs") {
  GroupStatus status("group", {0});
  const char* operations[] = {"zero", "one", "two", "three", "four"};
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (std::uint64_t number = 1; number < 2'000'000; ++number) status.enter(operations[number % 5]);
    over = true;
  });
  int torn = 0;
  while (!over) {
    const auto last = status.position();
    if (last.sequence > 0 && last.operation != operations[last.sequence % 5]) ++torn;
  }
  writer.join();
  CHECK(torn == 0);
}

TEST_CASE("the timeout of a program that sets none comes from the environment") {
  CHECK(lockstep::GlooOptions{}.timeout == 30min);
  setenv("LOCKSTEP_TIMEOUT", "90", 1);
  CHECK(lockstep::GlooOptions{}.timeout == 90s);
  CHECK(lockstep::GlooOptions{.timeout = 5s}.timeout == 5s);
  setenv("LOCKSTEP_TIMEOUT", "soon", 1);
  CHECK_THROWS_AS(lockstep::GlooOptions{}, lockstep::UsageError);
  unsetenv("LOCKSTEP_TIMEOUT");
}

}  // namespace messages_test
