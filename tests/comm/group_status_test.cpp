// The comparison of the ranks' calls: what GroupStatus records and reports, and what the store finds by it.
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "comm/random_calls.hpp"
#include "lockstep/comm/detail/group_status.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "support/catch.hpp"

namespace group_status_test {

using lockstep::ReduceOp;
using lockstep::detail::CallComparison;
using lockstep::detail::CallContent;
using lockstep::detail::CallDifference;
using lockstep::detail::FrameReader;
using lockstep::detail::FrameWriter;
using lockstep::detail::GroupStatus;
using lockstep::detail::RecordedCall;
using lockstep_test::mistaken;
using lockstep_test::random_steps;
using lockstep_test::Step;

namespace {

void enter(GroupStatus& status, const Step& step) {
  constexpr at::ScalarType dtypes[] = {at::kFloat, at::kDouble, at::kBFloat16};
  const std::vector<at::Tensor> tensors{at::empty({step.elements}, dtypes[step.dtype])};
  const auto op = step.op < 0 ? std::nullopt : std::optional(static_cast<ReduceOp>(step.op));
  const auto root = step.root < 0 ? std::nullopt : std::optional(step.root);
  status.enter(lockstep_test::operations[static_cast<std::size_t>(step.operation)], {},
               CallContent::of(op, root, tensors),
               std::make_shared<const std::string>("bucket " + std::to_string(step.label)));
}

std::vector<RecordedCall> last_calls(GroupStatus& status) {
  status.ask_calls();
  return status.new_marks().value().calls;
}

// The store's side: what two ranks differ in, once it is known.
class Store {
 public:
  void take(GroupStatus& status, int rank) {
    const auto marks = status.new_marks();
    for (std::size_t i = 0; marks && i < marks->marks.size(); ++i) {
      const auto difference = calls_.report(rank, marks->marks[i]);
      if (!found) found = difference;
    }
  }
  bool leave(const GroupStatus& status, int rank) {
    return calls_.leave(rank, status.position()).has_value();
  }
  std::optional<CallDifference> found;

 private:
  CallComparison calls_{4};
};

}  // namespace

TEST_CASE(
    "none of 1,000 programs whose ranks make different calls goes unnoticed, and right ones are let be") {
  int wrong = 0, missed = 0, blamed = 0, misplaced = 0;
  for (unsigned seed = 0; seed < 3000 && wrong < 1000; ++seed) {
    std::mt19937 random(seed);
    const auto right = random_steps(random);
    const int size = 2 + static_cast<int>(random() % 3), culprit = static_cast<int>(random() % 3) % size;
    const auto other = seed % 6 == 0 ? right : mistaken(right, random);
    wrong += other != right;
    Store store;
    bool left = false;
    std::vector<std::unique_ptr<GroupStatus>> ranks;
    for (int rank = 0; rank < size; ++rank)
      ranks.push_back(std::make_unique<GroupStatus>("group", std::vector<int>{0, 1}));
    for (std::size_t call = 0; call < std::max(right.size(), other.size()); ++call)
      for (int rank = 0; rank < size; ++rank) {
        GroupStatus& status = *ranks[static_cast<std::size_t>(rank)];
        const auto& steps = rank == culprit ? other : right;
        if (call < steps.size()) enter(status, steps[call]);
        if (random() % 50 == 0) store.take(status, rank);
      }
    for (int rank = 0; rank < size; ++rank) {
      store.take(*ranks[static_cast<std::size_t>(rank)], rank);
      left = store.leave(*ranks[static_cast<std::size_t>(rank)], rank) || left;
    }
    const bool found = store.found || left;
    missed += other != right && !found;
    blamed += other == right && found;
    if (!store.found) continue;
    const auto calls = [&](int rank) { return last_calls(*ranks[static_cast<std::size_t>(rank)]); };
    const auto first = lockstep::detail::first_difference(calls(store.found->one), calls(store.found->other));
    const auto differs =
        std::mismatch(right.begin(), right.end(), other.begin(), other.end()).first - right.begin();
    misplaced += !first || first->first.call.sequence != static_cast<std::uint64_t>(differs) + 1;
  }
  CHECK(wrong == 1000);
  CHECK(missed == 0);
  CHECK(blamed == 0);
  CHECK(misplaced == 0);
}

TEST_CASE("ranks at one pace, whatever it is, report a number that all of them report") {
  for (const int pace : {1, 3, 100, 5'000, 70'000}) {  // collectives between two reports
    GroupStatus one("group", {0, 1}), other("group", {0, 1});
    Store store;
    one.enter("barrier");
    other.enter("all_gather");
    int reports = 0;
    for (int call = 0; call < 4 * pace + 300 && !store.found; ++call) {
      one.enter("barrier");
      other.enter("barrier");
      if (call % pace == 0) store.take(one, 0);
      if (call % pace == pace / 2) store.take(other, 1), ++reports;
    }
    CAPTURE(pace);
    CHECK(store.found);
    CHECK((reports <= 4 || pace * reports <= 2 * 64));
  }
}

TEST_CASE("ranks that wait for each other after different numbers of collectives are told apart") {
  for (const int left_out : {1, 2, 40}) {
    GroupStatus one("group", {0, 1}), other("group", {0, 1});
    Store store;
    for (int call = 0; call < 100; ++call) {
      one.enter(call % 3 == 0 ? "barrier" : "all_gather");
      if (call < 80 || call >= 80 + left_out) other.enter(call % 3 == 0 ? "barrier" : "all_gather");
    }
    for (int report = 0; report < 2; ++report) {
      CHECK(!store.found);
      store.take(one, 0);
      store.take(other, 1);
    }
    CAPTURE(left_out);
    CHECK(store.found.has_value() == (left_out < 40));
    CHECK(!one.new_marks());
  }
}

TEST_CASE("a rank that has left reports its last collectives once more, and then nothing") {
  for (const bool reported : {false, true}) {
    GroupStatus status("group", {0, 1});
    for (int call = 0; call < 3; ++call) status.enter("barrier");
    if (reported) {
      const auto before = status.new_marks().value();
      CHECK(before.marks.size() == 1);
      CHECK(before.calls.empty());
    }
    status.leave();
    const auto last = status.new_marks().value();
    CHECK(last.marks.size() == 3);
    CHECK(last.calls.size() == 3);
    CHECK(!status.new_marks());
  }
}

TEST_CASE("the more ranks a group has, the fewer calls each sends as it leaves") {
  for (const auto& [ranks, calls] :
       std::map<int, std::size_t>{{2, 1024}, {16, 1024}, {64, 256}, {4096, 64}}) {
    GroupStatus status("group", std::vector<int>(static_cast<std::size_t>(ranks)));
    for (int call = 0; call < 1100; ++call) status.enter("barrier");
    status.leave();
    const auto last = status.new_marks().value();
    REQUIRE(last.calls.size() == calls);
    CHECK(last.calls.back().call.sequence == 1100);
  }
}

TEST_CASE("the last calls of a rank that has left stand for those of every rank with the same history") {
  CallComparison comparison(4);
  GroupStatus one("group", {0, 1}), other("group", {0, 1});
  for (int call = 0; call < 5; ++call)
    one.enter("barrier"), other.enter(call == 3 ? "all_gather" : "barrier");
  const auto calls = last_calls(one), others = last_calls(other);
  comparison.keep(calls);
  CHECK(comparison.kept(5, calls[4].hash).size() == 5);
  CHECK(comparison.kept(3, others[2].hash).size() == 5);  // as far as that both have made the same
  CHECK(comparison.kept(4, others[3].hash).empty());
  CHECK(comparison.kept(6, calls[4].hash).empty());
  CHECK(comparison.kept(0, 0).empty());
}

TEST_CASE("calls that the last 1,024 do not reach are said to differ all the same") {
  GroupStatus one("group", {0, 1}), other("group", {0, 1});
  one.enter("barrier");
  other.enter("all_gather");
  for (int call = 0; call < 2000; ++call) one.enter("barrier"), other.enter("barrier");
  const auto failure =
      lockstep::detail::mismatch({1, 0, 2001}, "lockstep/comm/0", last_calls(one), last_calls(other));
  CHECK(failure.kind == lockstep::FailureKind::mismatch);
  CHECK(failure.rank == 0);
  CHECK(failure.cause == 1);
  CHECK(failure.message ==
        "ranks 0 and 1 have made different calls in the communicator 'lockstep/comm/0', at the latest in "
        "collective #2001, and their last calls do not show which; every rank must make the same calls, in "
        "the same order");
}

TEST_CASE("ranks that leave after different numbers of calls are named with their last ones") {
  using lockstep::FailedCall;
  const FailedCall last{.operation = "broadcast", .sequence = 7};
  const auto failure = lockstep::detail::left_unequally(2, last, 1, FailedCall{});
  CHECK(failure.rank == 1);
  CHECK(failure.cause == 2);
  CHECK(failure.call.sequence == 7);
  CHECK(failure.message ==
        "rank 1 has left after no collective, and rank 2 after broadcast #7; every rank must make the same "
        "calls, and equally many");
}

}  // namespace group_status_test
