// Exact weights cost no collective: a step makes those of its buckets and no other.
#include "lockstep/comm/cpu_comm.hpp"
#include "support/ranks.hpp"
#include "train/regression.hpp"

namespace collectives_test {

namespace {

int collectives = 0;

// Counts the members of a Communicator.
class CountedGloo : public lockstep::CpuComm {
 public:
  using CpuComm::CpuComm;
  Work all_reduce(at::TensorList tensors, lockstep::ReduceOp op) {
    ++collectives;
    return CpuComm::all_reduce(tensors, op);
  }
  Work broadcast(at::TensorList tensors, int root) {
    ++collectives;
    return CpuComm::broadcast(tensors, root);
  }
  Work all_gather(at::TensorList outputs, at::TensorList inputs) {
    ++collectives;
    return CpuComm::all_gather(outputs, inputs);
  }
  std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    ++collectives;
    return CpuComm::all_gather_bytes(bytes);
  }
  std::string broadcast_bytes(const std::string& bytes, int root) {
    ++collectives;
    return CpuComm::broadcast_bytes(bytes, root);
  }
};

// Of a run of so many steps, the last of them rank 0's alone.
template <class Loss>
int collectives_of(std::int64_t steps, Loss&& loss) {
  const lockstep::TrainerOptions options{.batch_size = 2, .accumulate = 2, .pad = false, .progress = false};
  lockstep::Trainer<torch::nn::Sequential, lockstep::DistributedSampler, CountedGloo, lockstep::Fp32> trainer{
      test_world(), options, tanh_network(1, 3, 5)};
  collectives = 0;
  const auto report = trainer.fit(curve((steps - 1) * 4 * test_world().size() + 1), loss);
  CHECK(report.step == steps);
  return collectives;
}

}  // namespace

TEST_CASE("a step of uneven shares and micro-batches makes one collective for its one bucket") {
  CHECK(collectives_of(8, squared_error) - collectives_of(4, squared_error) == 4);
  CHECK(collectives_of(8, summed_squared_error) - collectives_of(4, summed_squared_error) == 4);
}

}  // namespace collectives_test
