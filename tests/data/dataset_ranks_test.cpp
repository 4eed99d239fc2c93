#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/data/dataset.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"

namespace dataset_ranks_test {

using lockstep::TensorDataset;

namespace {

// What the check says here; empty where it has nothing to say.
template <class... Args>
std::string said(lockstep::CpuComm& comm, Args&&... args) {
  return text_of<lockstep::MismatchError>([&] { lockstep::check_same_dataset(comm, args...); });
}

void check_equal_everywhere(lockstep::CpuComm& comm, const std::string& text) {
  for (const std::string& other : comm.all_gather_bytes(text)) CHECK(other == text);
}

}  // namespace

TEST_CASE("every rank hears the same of a dataset that differs on one") {
  const lockstep::World& world = test_world();
  lockstep::CpuComm comm{world};
  const bool last = world.rank() == world.size() - 1, alone = world.size() == 1;
  const at::Tensor data = torch::arange(40).view({20, 2}), target = torch::arange(20);
  TensorDataset same{data, target}, reversed{data.flip(0), target};

  CHECK(said(comm, same).empty());
  CHECK(said(comm, std::size_t{20}).empty());

  const std::string length = said(comm, std::size_t{last ? 19u : 20u});
  CHECK(length.empty() == alone);
  check_equal_everywhere(comm, length);
  if (!alone) CHECK_THAT(length, ContainsSubstring("19 on rank " + std::to_string(world.size() - 1)));

  const std::string content = said(comm, last ? reversed : same);
  CHECK(content.empty() == alone);
  check_equal_everywhere(comm, content);
  comm.shutdown();
}

}  // namespace dataset_ranks_test
