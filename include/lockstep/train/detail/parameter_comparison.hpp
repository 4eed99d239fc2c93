#pragma once

#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/log/log.hpp"

namespace lockstep::detail {

/// Runs check_same_parameters, unless the Reduction lets ranks diverge. Warns once about differences by
/// rounding, which processors of different kinds cause.
template <class Reduction>
class ParameterComparison {
 public:
  /// Collective, unless the Reduction lets ranks diverge; then a no-op.
  template <class Comm>
  void run(const std::vector<NamedTensor>& parameters, Comm& comm, const Log& log) {
    if constexpr (!requires { requires Reduction::ranks_diverge; }) {
      const double distance = check_same_parameters(parameters, comm);
      if (distance > 0 && !std::exchange(told_, true))
        log.warning(
            "the parameters of the ranks differ by rounding, {:.1g} of their norm at most: "
            "processors of different kinds compute so",
            distance);
    }
  }

 private:
  bool told_ = false;
};

}  // namespace lockstep::detail
