#include "lockstep/grad/detail/parameter_table.hpp"

#include <torch/torch.h>

#include <string>
#include <vector>

#include "support/catch.hpp"

namespace parameter_table_test {

using namespace lockstep::detail;

namespace {

ParameterTable table_of_three() {
  const auto first = torch::ones({4}).requires_grad_(), frozen = torch::ones({2}),
             last = torch::ones({3}, torch::kDouble).requires_grad_();
  return {{{"first", first}, {"frozen", frozen}, {"last", last}}, {last.unsafeGetTensorImpl()}};
}

}  // namespace

TEST_CASE("a table has an entry for each parameter that requires grad, in registration order") {
  ParameterTable made = table_of_three();
  const ParameterTable table = std::move(made);  // the names must stay valid
  CHECK(table.all.size() == 3);
  REQUIRE(table.trained.size() == 2);
  CHECK(table.trained[0].name == "first");
  CHECK(table.trained[0].bytes == 16);
  CHECK(!table.trained[0].sparse);
  CHECK(table.trained[1].name == "last");
  CHECK(table.trained[1].dtype == torch::kDouble);
  CHECK(table.trained[1].sparse);
}

TEST_CASE("an average is known until its gradient is cleared or replaced") {
  ParameterTable table = table_of_three();
  const auto names = [&] {
    std::vector<std::string> held;
    for (const ParameterEntry& parameter : table.trained)
      if (parameter.reduced.first) held.emplace_back(parameter.name);
    return held;
  };
  for (ParameterEntry& parameter : table.trained) parameter.gradient() = torch::ones_like(parameter.tensor);
  note_reduced(table.trained);
  CHECK(names() == std::vector<std::string>{"first", "last"});
  table.trained[0].gradient().mul_(0.5);  // as clipping does
  forget_cleared(table.trained);
  CHECK(names() == std::vector<std::string>{"first", "last"});
  CHECK_THROWS_WITH(require_no_average(table.trained, [](std::size_t i) { return i == 1; }),
                    ContainsSubstring("parameter 'last'"));
  table.trained[0].gradient().zero_();
  table.trained[1].gradient().reset();
  forget_cleared(table.trained);
  CHECK(names().empty());
  CHECK_NOTHROW(require_no_average(table.trained, [](std::size_t) { return true; }));
}

TEST_CASE("a parameter that was frozen, unfrozen or added is named") {
  const ParameterTable table = table_of_three();
  const auto refused = [&](const std::vector<lockstep::NamedTensor>& now) -> std::string {
    WatchedParameters watched(table, {"ignored"});
    try {
      watched.check(
          {}, [&] { return now; }, [] { return false; });
    } catch (const lockstep::UsageError& error) {
      return error.what();
    }
    return "";
  };
  auto now = table.all;
  now.push_back({"ignored", torch::ones({1})});
  CHECK(refused(now).empty());
  now.push_back({"added", torch::ones({1})});
  CHECK_THAT(refused(now), ContainsSubstring("parameter 'added' was added or replaced"));
  table.all[1].tensor.set_requires_grad(true);
  CHECK_THAT(refused(table.all), ContainsSubstring("parameter 'frozen' was unfrozen"));
  table.all[1].tensor.set_requires_grad(false);
  table.all[2].tensor.set_requires_grad(false);
  CHECK_THAT(refused(table.all), ContainsSubstring("parameter 'last' was frozen"));
}

}  // namespace parameter_table_test
