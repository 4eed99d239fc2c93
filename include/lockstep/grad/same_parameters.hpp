#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/named_tensors.hpp"

namespace lockstep {

namespace detail {

/// A number that another value of any element changes: the sum of their bits as integers, exact in any order.
inline at::Tensor sum_of_bits(const at::Tensor& tensor) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const std::size_t size = real.element_size();
  const at::ScalarType integer = size == 8   ? at::kLong
                                 : size == 4 ? at::kInt
                                 : size == 2 ? at::kShort
                                             : at::kByte;
  return real.view(integer).sum(at::kLong);
}

/// The sums of all parameters one after the other, as bytes. A device is asked once.
inline std::string digest_of(const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> sums;
  for (const NamedTensor& parameter : parameters)
    sums.push_back(sum_of_bits(parameter.tensor).to(parameters[0].tensor.device(), /*non_blocking=*/true));
  const at::Tensor all = at::stack(sums).cpu();
  return {static_cast<const char*>(all.const_data_ptr()), all.nbytes()};
}

/// How far this rank's parameter is from rank 0's, over the norm of that one; 1 where that cannot be said.
template <Reducing Comm>
double relative_distance(const at::Tensor& parameter, Comm& comm) {
  at::Tensor first = parameter.detach().clone(at::MemoryFormat::Contiguous);
  comm.broadcast(first, 0).wait_host();
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
  };
  const auto norm = [](const at::Tensor& tensor) {
    return at::linalg_vector_norm(tensor).template item<double>();
  };
  const double distance = norm(wide(parameter.detach()) - wide(first)), length = norm(wide(first));
  if (distance == 0) return 0;
  return std::isfinite(distance) && length > 0 ? distance / length : 1;
}

}  // namespace detail

/// Compares the values of the parameters over all ranks, which a training step leaves equal: an optimizer
/// that is another one on some rank, a model loaded on one rank alone, gradients changed on one rank make
/// them part without any other sign. Sends eight bytes for each parameter; only where they differ, rank 0's
/// parameters themselves.
///
/// `parameters` are the same on every rank but for their values. Returns how far the farthest parameter of
/// any rank is from rank 0's, relative to that one's norm: 0 where all bits are equal, and around the
/// rounding of the dtype where processors of different kinds compute. Throws one and the same MismatchError
/// on every rank where that is more than `tolerance`. Collective.
template <class Comm>
requires Reducing<Comm> && Gathering<Comm>
double check_same_parameters(const std::vector<NamedTensor>& parameters, Comm& comm,
                             double tolerance = 1e-3) {
  if (comm.size() == 1 || parameters.empty()) return 0;
  const c10::NoGradGuard no_grad;
  const std::vector<std::string> digests = comm.all_gather_bytes(detail::digest_of(parameters));
  const std::size_t count = parameters.size();
  double worst = 0;
  std::string mine(count * sizeof(double), '\0');
  std::vector<std::size_t> differing;
  for (std::size_t i = 0; i < count; ++i)
    for (const std::string& digest : digests)
      if (std::memcmp(&digest[8 * i], &digests[0][8 * i], 8) != 0) {
        differing.push_back(i);
        break;
      }
  if (differing.empty()) return 0;
  for (const std::size_t i : differing) {
    const double distance = detail::relative_distance(parameters[i].tensor, comm);
    std::memcpy(&mine[8 * i], &distance, 8);
  }
  const std::vector<std::string> distances = comm.all_gather_bytes(mine);
  std::size_t farthest = differing[0], rank = 0;
  for (const std::size_t i : differing)
    for (std::size_t r = 0; r < distances.size(); ++r) {
      double distance = 0;
      std::memcpy(&distance, &distances[r][8 * i], 8);
      if (distance <= worst) continue;
      worst = distance;
      farthest = i;
      rank = r;
    }
  if (worst > tolerance) {
    const detail::RankNames name_of(comm);
    throw MismatchError(fmt::format(
        "the ranks' models have parted: {} of {} parameters differ, most of all parameter {} '{}' on rank "
        "{}, "
        "which is {:.2g} of its norm away from rank {}'s; load, initialise and step the model alike on every "
        "rank, and change gradients only in the same way",
        differing.size(), count, farthest, parameters[farthest].name, name_of(rank), worst, name_of(0)));
  }
  return worst;
}

}  // namespace lockstep
