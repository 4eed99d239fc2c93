#include "lockstep/train/trainer_options.hpp"

#include <limits>

#include "support/refuses.hpp"

namespace trainer_options_test {

using lockstep::TrainerOptions;
using lockstep::UsageError;

TEST_CASE("options that cannot train are refused by name before training") {
  const auto refused = [](const TrainerOptions& options, const char* name) {
    refuses<UsageError>([&] { lockstep::validated(options); }, name);
  };
  refused({.epochs = -1}, "epochs is -1");
  refused({.steps = -5}, "steps is -5");
  refused({.epochs = 1, .steps = 5}, "both epochs (1) and steps (5)");
  refused({.batch_size = 0}, "batch_size is 0");
  refused({.accumulate = -1}, "accumulate is -1");
  refused({.batch_size = 3, .accumulate = std::numeric_limits<std::int64_t>::max() / 2}, "accumulate is 46");
  refused({.lr = std::numeric_limits<double>::quiet_NaN()}, "learning rate is nan");
  refused({.lr = std::numeric_limits<double>::infinity()}, "learning rate is inf");
  refused({.lr = -1e-3}, "learning rate is -0.001");
  refused({.drop_last = true, .pad = false}, "drop_last is true and pad is false");
  refused({.num_workers = -1}, "num_workers is -1");
  refused({.num_workers = 100'000}, "num_workers is 100000");
}

TEST_CASE("options that train are passed on") {
  CHECK(lockstep::validated({.steps = 7}).steps == 7);
  CHECK_NOTHROW(lockstep::validated({}));
  CHECK_NOTHROW(lockstep::validated({.epochs = 0, .lr = 0}));
}

}  // namespace trainer_options_test
