// What a checkpoint keeps of each rank, of a device's generator too.
#include <torch/torch.h>

#include "lockstep/train/checkpoint.hpp"
#include "support/catch.hpp"
#include "support/played_device.hpp"

namespace rank_state_test {

namespace parts = lockstep::detail;

namespace {

at::Tensor drawn() {
  return torch::rand({4}, at::globalContext().defaultGenerator(played_device));
}

}  // namespace

TEST_CASE("a rank's state holds the generator of its device beside that of the CPU") {
  play_device();
  parts::RankState state;
  state.generator = parts::default_generator_state();
  state.device_generator = parts::default_generator_state(played_device);
  const auto first = drawn();
  const auto read = parts::RankState::read(state.bytes());
  CHECK(at::equal(read.generator, state.generator));
  CHECK(!at::equal(drawn(), first));
  parts::set_default_generator_state(read.device_generator, played_device);
  CHECK(at::equal(drawn(), first));

  // Of two ranks that go on as three, the third keeps the generators that it has.
  const std::vector<parts::RankState> both{state, state};
  CHECK(parts::state_of_rank<void>(both, 1, 3).device_generator.defined());
  CHECK(!parts::state_of_rank<void>(both, 2, 3).device_generator.defined());
}

TEST_CASE("a rank's state with impossible lengths is refused") {
  parts::RankState state;
  state.generator = parts::default_generator_state();
  for (const std::int64_t length : {std::int64_t{-1}, std::int64_t{1}, std::int64_t{1} << 60}) {
    torch::serialize::OutputArchive archive;
    archive.write("loss_sum", c10::IValue(1.0));
    archive.write("loss_count", c10::IValue(1.0));
    archive.write("generator", state.generator, /*is_buffer=*/true);
    archive.write("buffers", c10::IValue(length));
    CHECK_THROWS_AS(parts::RankState::read(parts::bytes_of(archive)), lockstep::CheckpointError);
    torch::serialize::OutputArchive hook_archive;
    hook_archive.write("size", c10::IValue(length));
    auto hook = parts::archive_of(parts::bytes_of(hook_archive));
    CHECK_THROWS_AS(parts::read_hook_state(hook), lockstep::CheckpointError);
  }
}

TEST_CASE("a rank's state without a device reads as it was written") {
  parts::RankState state;
  state.generator = parts::default_generator_state();
  state.loss = {3, 2};
  const auto read = parts::RankState::read(state.bytes());
  CHECK(!read.device_generator.defined());
  CHECK(read.loss.sum == 3);
}

}  // namespace rank_state_test
