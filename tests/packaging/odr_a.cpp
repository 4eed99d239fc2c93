// One of two files that include every header; the other takes the addresses of the same things.
#include "everything.hpp"
#include "odr.hpp"
#include "support/catch.hpp"

std::array<const void*, 2> addresses_in_a() {
  return {&lockstep::detail::process_rank, reinterpret_cast<const void*>(&lockstep::World::from_environment)};
}

TEST_CASE("every header may be included in several files of one program") {
  REQUIRE(addresses_in_a() == addresses_in_b());
}
