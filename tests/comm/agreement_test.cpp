#include "lockstep/comm/agreement.hpp"

#include <barrier>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/local_comm.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace agreement_test {

using lockstep::NamedValues;
using Strings = std::vector<std::string>;

namespace {

/// A rank that is a thread of this process. It gathers bytes, and no more.
struct ThreadComm : lockstep::LocalComm {
  ThreadComm(std::size_t rank, Strings& all, std::barrier<>& met)
      : LocalComm(lockstep::World()), number(rank), all(&all), met(&met) {}
  [[nodiscard]] int rank() const { return static_cast<int>(number); }
  [[nodiscard]] int size() const { return static_cast<int>(all->size()); }
  Strings all_gather_bytes(const std::string& bytes) const {
    (*all)[number] = bytes;
    met->arrive_and_wait();
    Strings gathered = *all;
    met->arrive_and_wait();
    return gathered;
  }
  std::size_t number;
  Strings* all;
  std::barrier<>* met;
};

// The text of the error that every rank throws in `act(comm, value of the rank)`; empty where they throw none.
template <class Value, class Act>
std::string told(const std::vector<Value>& values, const Act& act) {
  Strings all(values.size()), texts(values.size());
  std::barrier met(std::ssize(values));
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < values.size(); ++rank)
    ranks.emplace_back([&, rank] {
      ThreadComm comm(rank, all, met);
      texts[rank] = text_of<lockstep::Error>([&] { act(comm, values[rank]); });
    });
  for (std::thread& rank : ranks) rank.join();
  CHECK(texts == Strings(texts.size(), texts[0]));
  return texts[0];
}

// Of ranks that return, or throw what stands behind '-'.
std::string told_of_failures(const Strings& outcomes) {
  return told(outcomes, [](ThreadComm& comm, const std::string& outcome) {
    lockstep::agree(comm, [&] {
      if (outcome == "-int") throw 1;
      if (outcome == "-tensor") TORCH_CHECK(false, "no such tensor");
      if (outcome[0] == '-') throw std::runtime_error(outcome.substr(1));
    });
  });
}

}  // namespace

TEST_CASE("failures of several ranks become one text, of each the first line") {
  CHECK(told_of_failures({"+", "+"}).empty());
  CHECK(told_of_failures({"+", "-bad", "-worse\x1b"}) == "rank 1: bad; rank 2: worse\\x1b");
  CHECK(told_of_failures({"-bad\nsecond", "-bad"}) == "bad");
  CHECK(told_of_failures({"-", "-int", "-tensor"}) ==
        "rank 0: an exception without a text; rank 1: an exception of unknown type; rank 2: no such tensor");
}

TEST_CASE("the first difference names the value and the ranks that have it") {
  const auto of = [](const std::vector<NamedValues>& ranks) {
    return told(ranks, [](ThreadComm& comm, const NamedValues& values) {
      lockstep::require_equal(comm, values, "they differ", "mend it");
    });
  };
  const auto differs = [&](const std::vector<NamedValues>& ranks, const std::string& difference) {
    CHECK(of(ranks) == "they differ: " + difference + "; mend it");
  };
  const NamedValues a{{"lr", "1"}, {"seed", "2"}}, b{{"lr", "1"}, {"seed", ""}},
      c{{"lr", "1"}, {"seed", "3"}};
  CHECK(of({a, a}).empty());
  differs({a, c}, "seed is 2 on rank 0 and 3 on rank 1");
  differs({a, c, a}, "seed is 2 on ranks 0, 2 and 3 on rank 1");
  differs({a, b, c}, "seed is 2 on rank 0, empty on rank 1 and 3 on rank 2");
  differs({{}, a}, "lr is absent on rank 0 and 1 on rank 1");
  differs({{a[0]}, a}, "seed is absent on rank 0 and 2 on rank 1");
  // A name that one rank lacks shifts the values behind it.
  differs({{{"parameter 0", "x"}, {"parameter 1", "y"}, {"buffer 0", "z"}},
           {{"parameter 0", "x"}, {"buffer 0", "z"}}},
          "parameter 1 is y on rank 0 and absent on rank 1");
  differs({{{"parameter 0", "x"}}, {{"buffer 0", "x"}}}, "parameter 0 is x on rank 0 and absent on rank 1");
  std::vector<NamedValues> many(12, a);
  many[3] = c;
  differs(many, "seed is 2 on ranks 0, 1, 2, 4, 5, 6, 7, 8 and 3 more and 3 on rank 3");
}

TEST_CASE("a single process agrees with itself") {
  lockstep::LocalComm comm{lockstep::World::from_environment()};
  CHECK(lockstep::agree(comm, [] { return std::string("x"); }) == Strings{"x"});
  CHECK(lockstep::agree_with_rank_zero(comm, [] { return std::string("y"); }) == "y");
  CHECK_NOTHROW(lockstep::require_equal(comm, {{"a", "b"}}, "never", "none"));
  CHECK(lockstep::any_rank(comm, true));
  CHECK_THROWS_AS(lockstep::agree<lockstep::DataError>(comm, [] { throw std::runtime_error("bad"); }),
                  lockstep::DataError);
}

}  // namespace agreement_test
