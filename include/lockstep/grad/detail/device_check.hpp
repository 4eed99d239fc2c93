#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Throws UsageError unless all parameters are on the device `named`. A device without an index, such as
/// "cuda", matches any device of its type.
inline void check_device(const std::vector<NamedTensor>& parameters, const c10::Device& named) {
  for (const NamedTensor& item : parameters)
    if (item.tensor.device() != parameters[0].tensor.device())
      throw UsageError(detail::formatted(
          "DdpOptions::device is {}, but the parts of this model live on several devices: '{}' on {} "
          "and '{}' on {}; leave the option out",
          named.str(), parameters[0].name, parameters[0].tensor.device().str(), item.name,
          item.tensor.device().str()));
  if (parameters.empty()) return;
  const c10::Device& device = parameters[0].tensor.device();
  if (device.type() != named.type() || (named.has_index() && device.index() != named.index()))
    throw UsageError(detail::formatted("DdpOptions::device is {}, but '{}' is on {}: move the model before",
                                       named.str(), parameters[0].name, device.str()));
}

}  // namespace lockstep::detail
