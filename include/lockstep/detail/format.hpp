#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

#include <fmt/args.h>
#include <fmt/format.h>

namespace lockstep::detail {

// One argument of `formatted`. fmt::format instantiates a dozen templates for each list of argument types, in
// every file that includes the header; lockstep's messages need only these types.
class FormatArgument {
 public:
  FormatArgument(bool value) : value_(value) {}
  FormatArgument(char value) : value_(value) {}
  FormatArgument(int value) : value_(static_cast<long long>(value)) {}
  FormatArgument(long value) : value_(static_cast<long long>(value)) {}
  FormatArgument(long long value) : value_(value) {}
  FormatArgument(unsigned value) : value_(static_cast<unsigned long long>(value)) {}
  FormatArgument(unsigned long value) : value_(static_cast<unsigned long long>(value)) {}
  FormatArgument(unsigned long long value) : value_(value) {}
  FormatArgument(float value) : value_(value) {}
  FormatArgument(double value) : value_(value) {}
  FormatArgument(const char* value) : value_(std::string_view(value)) {}
  FormatArgument(const std::string& value) : value_(std::string_view(value)) {}
  FormatArgument(std::string_view value) : value_(value) {}

  void append_to(fmt::dynamic_format_arg_store<fmt::format_context>& store) const {
    switch (value_.index()) {
      case 0:
        return store.push_back(std::get<0>(value_));
      case 1:
        return store.push_back(std::get<1>(value_));
      case 2:
        return store.push_back(std::get<2>(value_));
      case 3:
        return store.push_back(std::get<3>(value_));
      case 4:
        return store.push_back(std::get<4>(value_));
      case 5:
        return store.push_back(std::get<5>(value_));
      default:
        return store.push_back(fmt::string_view(std::get<6>(value_).data(), std::get<6>(value_).size()));
    }
  }

 private:
  std::variant<bool, char, long long, unsigned long long, float, double, std::string_view> value_;
};

inline std::string format_list(std::string_view text, std::initializer_list<FormatArgument> arguments) {
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  for (const auto& argument : arguments) argument.append_to(store);
  return fmt::vformat(fmt::string_view(text.data(), text.size()), store);
}

#ifdef LOCKSTEP_CHECK_FORMATS
// For the test that compiles every header alone: fmt checks each text against the types of its arguments.
template <class... Args>
std::string formatted(fmt::format_string<Args...> text, Args&&... args) {
  return fmt::format(text, std::forward<Args>(args)...);
}
#else
// Formats a message in fmt's syntax.
template <class... Args>
std::string formatted(std::string_view text, const Args&... args) {
  return format_list(text, {FormatArgument(args)...});
}
#endif

}  // namespace lockstep::detail
