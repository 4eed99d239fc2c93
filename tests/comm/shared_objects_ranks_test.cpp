// A program of which several shared objects use lockstep, each with the headers compiled for itself and
// nothing exported, as Python's extensions are built.
#include <memory>

#include "comm/shared_object.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "support/ranks.hpp"

namespace shared_objects_ranks_test {

namespace {

using Comm = std::unique_ptr<void, void (*)(void*)>;

Comm comm_of(const SharedObject& object) {
  return {object.make_comm(test_world()), object.destroy_comm};
}

}  // namespace

TEST_CASE("communicators of several shared objects do not meet under one name") {
  const int size = test_world().size();
  const double sum = size * (size + 1) / 2.0;
  lockstep::GlooComm own{test_world()};
  const SharedObject &a = *shared_object_a(), &b = *shared_object_b();
  const Comm of_a = comm_of(a), of_b = comm_of(b);
  const double value = test_world().rank() + 1;
  for (int round = 0; round < 3; ++round) {
    CHECK(a.sum(of_a.get(), value) == sum);
    CHECK(b.sum(of_b.get(), 10 * value) == 10 * sum);
    auto tensor = at::full({1}, 100 * value);
    own.all_reduce(tensor).synchronize();
    CHECK(tensor.item<double>() == 100 * sum);
  }
}

TEST_CASE("shared objects have one process's state") {
  const SharedObject &a = *shared_object_a(), &b = *shared_object_b();
  CHECK(a.rank_of_error() == test_world().rank());
  CHECK(b.rank_of_error() == test_world().rank());
  const Comm of_a = comm_of(a), of_b = comm_of(b);  // whose control plane lives as long
  if (test_world().size() > 1) CHECK(a.control_plane(test_world()) == b.control_plane(test_world()));
  test_world().rank_zero([&] { CHECK(!a.error_of_sum(of_a.get()).empty()); });
  CHECK(a.error_of_sum(of_a.get()).empty());
}

}  // namespace shared_objects_ranks_test
