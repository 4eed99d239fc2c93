#include "lockstep/datasets/digits.hpp"

#include "support/catch.hpp"

namespace digits_test {

namespace {
std::uint64_t hash_of(const at::Tensor& bytes) {
  std::uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (std::size_t i = 0; i < bytes.nbytes(); ++i)
    hash = (hash ^ static_cast<const std::uint8_t*>(bytes.const_data_ptr())[i]) * 1099511628211U;
  return hash;
}
}  // namespace

TEST_CASE("drawn digits are the same each time and other ones for another seed") {
  const auto first = lockstep::draw_digits(1234, 7), again = lockstep::draw_digits(1234, 7);
  CHECK(at::equal(first.images, again.images));
  CHECK(at::equal(first.labels, again.labels));
  CHECK_FALSE(at::equal(first.images, lockstep::draw_digits(1234, 8).images));
  // Fewer of them are the first of more, whatever the threads did.
  CHECK(at::equal(lockstep::draw_digits(55, 7).images, first.images.narrow(0, 0, 55)));
  CHECK(first.images.sizes() == at::IntArrayRef({1234, 28, 28}));
}

TEST_CASE("drawn digits are balanced, inked and unlike each other") {
  const auto digits = lockstep::draw_digits(2000, 3);
  CHECK(at::equal(digits.labels.to(at::kLong).bincount(), torch::full({10}, 200, at::kLong)));
  // A stride without shuffling still meets every class.
  CHECK(digits.labels.slice(0, 0, 2000, 2).to(at::kLong).bincount().min().item<int>() > 50);
  const at::Tensor ink = digits.images.to(at::kFloat).mean({1, 2});
  CHECK(ink.min().item<float>() > 5);
  CHECK(ink.max().item<float>() < 130);
  CHECK(
      std::get<0>(at::_unique(digits.images.to(at::kLong).mul(torch::arange(784).view({28, 28})).sum({1, 2})))
          .numel() > 1900);
}

TEST_CASE("the drawing that v1 names has not changed") {
  const auto digits = lockstep::draw_digits(100, 1);
  CHECK(hash_of(digits.labels) == 0x39845415b601619);
  CHECK(hash_of(digits.images) == 0xd76a26c744ada110);
}

}  // namespace digits_test
