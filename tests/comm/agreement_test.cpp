#include "lockstep/comm/agreement.hpp"

#include <stdexcept>

#include "lockstep/comm/local_comm.hpp"
#include "support/catch.hpp"

namespace agreement_test {

using lockstep::NamedValues;
using lockstep::detail::failures_text;
using lockstep::detail::first_difference;
using lockstep::detail::outcome_of;

TEST_CASE("an outcome holds the result, or the first line of the exception's text") {
  CHECK(outcome_of([] {}) == "+");
  CHECK(outcome_of([] { return std::string("a\0b", 3); }) == std::string("+a\0b", 4));
  CHECK(outcome_of([] { throw std::runtime_error("first\nsecond"); }) == "-first");
  CHECK(outcome_of([] { TORCH_CHECK(false, "no such tensor"); }) == "-no such tensor");
  CHECK(outcome_of([] { throw 1; }) == "-an exception of unknown type");
}

TEST_CASE("failures of several ranks become one text") {
  CHECK(failures_text({"+", "+result"}, {}).empty());
  CHECK(failures_text({"+", "-bad", "-worse\x1b"}, {}) == "rank 1: bad; rank 2: worse\\x1b");
  CHECK(failures_text({"-bad", "-bad"}, {}) == "bad");
  CHECK(failures_text({"+", "-"}, {}) == "rank 1: an exception without a text");
}

TEST_CASE("the first difference names the value and the ranks that have it") {
  const auto of = [](const std::vector<NamedValues>& ranks) {
    std::vector<std::string> serialized;
    for (const NamedValues& values : ranks) serialized.push_back(lockstep::detail::serialize(values));
    return first_difference(serialized);
  };
  const NamedValues a{{"lr", "1"}, {"seed", "2"}}, b{{"lr", "1"}, {"seed", ""}},
      c{{"lr", "1"}, {"seed", "3"}};
  CHECK(of({a, a}).empty());
  CHECK(of({a, c}) == "seed is 2 on rank 0 and 3 on rank 1");
  CHECK(of({a, c, a}) == "seed is 2 on ranks 0, 2 and 3 on rank 1");
  CHECK(of({a, b, c}) == "seed is 2 on rank 0, empty on rank 1 and 3 on rank 2");
  CHECK(of({{}, a}) == "lr is absent on rank 0 and 1 on rank 1");
  CHECK(of({{a[0]}, a}) == "seed is absent on rank 0 and 2 on rank 1");
  // A name that one rank lacks shifts the values behind it.
  CHECK(of({{{"parameter 0", "x"}, {"parameter 1", "y"}, {"buffer 0", "z"}},
            {{"parameter 0", "x"}, {"buffer 0", "z"}}}) == "parameter 1 is y on rank 0 and absent on rank 1");
  CHECK(of({{{"parameter 0", "x"}}, {{"buffer 0", "x"}}}) ==
        "parameter 0 is x on rank 0 and absent on rank 1");
  std::vector<NamedValues> many(12, a);
  many[3] = c;
  CHECK(of(many) == "seed is 2 on ranks 0, 1, 2, 4, 5, 6, 7, 8 and 3 more and 3 on rank 3");
}

TEST_CASE("a single process agrees with itself") {
  lockstep::LocalComm comm{lockstep::World::from_environment()};
  CHECK(lockstep::agree(comm, [] { return std::string("x"); }) == std::vector<std::string>{"x"});
  CHECK(lockstep::agree_with_rank_zero(comm, [] { return std::string("y"); }) == "y");
  CHECK_NOTHROW(lockstep::require_equal(comm, {{"a", "b"}}, "never", "none"));
  CHECK(lockstep::any_rank(comm, true));
  CHECK_THROWS_AS(lockstep::agree<lockstep::DataError>(comm, [] { throw std::runtime_error("bad"); }),
                  lockstep::DataError);
}

}  // namespace agreement_test
