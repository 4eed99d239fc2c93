#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include "lockstep/detail/json.hpp"
#include "lockstep/detail/libtorch_version.hpp"
#include "lockstep/train/detail/archive.hpp"

// The files of Python's torch.save: a ZIP archive with a pickle of protocol 2, whose tensors refer to
// storages in records of their own. LibTorch's own unpickler reads an OrderedDict, which is what a state dict
// is, as None, and no object of a class that it does not know.

namespace lockstep::inline v0_1::detail {

/// A dtype that files hold: the class of Python's `torch` module that holds the elements of such tensors, and
/// the name in safetensors. A name is empty if there is none.
struct FileDtype {
  at::ScalarType type;
  std::string_view storage, safetensors;
};
inline constexpr std::array<FileDtype, 21> file_dtypes{{{at::kDouble, "DoubleStorage", "F64"},
                                                        {at::kFloat, "FloatStorage", "F32"},
                                                        {at::kHalf, "HalfStorage", "F16"},
                                                        {at::kBFloat16, "BFloat16Storage", "BF16"},
                                                        {at::kLong, "LongStorage", "I64"},
                                                        {at::kInt, "IntStorage", "I32"},
                                                        {at::kShort, "ShortStorage", "I16"},
                                                        {at::kChar, "CharStorage", "I8"},
                                                        {at::kByte, "ByteStorage", "U8"},
                                                        {at::kBool, "BoolStorage", "BOOL"},
                                                        {at::kComplexFloat, "ComplexFloatStorage", "C64"},
                                                        {at::kComplexDouble, "ComplexDoubleStorage", ""},
                                                        {at::kUInt16, "", "U16"},
                                                        {at::kUInt32, "", "U32"},
                                                        {at::kUInt64, "", "U64"},
                                                        {at::kFloat8_e4m3fn, "", "F8_E4M3"},
                                                        {at::kFloat8_e5m2, "", "F8_E5M2"},
                                                        {at::kFloat8_e4m3fnuz, "", "F8_E4M3FNUZ"},
                                                        {at::kFloat8_e5m2fnuz, "", "F8_E5M2FNUZ"},
                                                        {float8_e8m0fnu, "", "F8_E8M0"},
                                                        {float4_e2m1fn_x2, "", "F4"}}};
/// Returns the dtype whose `member` is `value`, null if there is none that LibTorch has.
template <class Value>
const FileDtype* file_dtype(Value FileDtype::*member, const Value& value) {
  const auto* found = std::find_if(file_dtypes.begin(), file_dtypes.end(), [&](const FileDtype& one) {
    return one.type != at::ScalarType::Undefined && one.*member == value;
  });
  return found == file_dtypes.end() ? nullptr : found;
}

/// Returns why a file cannot hold the tensor, such as "of dtype uint16"; an empty text if it can.
inline std::string unwritable(const at::Tensor& tensor, std::string_view FileDtype::*format) {
  if (!tensor.defined()) return "undefined";
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta())
    return "sparse, quantized or without data";
  const FileDtype* dtype = file_dtype(&FileDtype::type, tensor.scalar_type());
  if (dtype && dtype->type == float4_e2m1fn_x2 && tensor.dim() == 0)
    return "a scalar of two values in a byte";
  return dtype && !(dtype->*format).empty() ? "" : "of dtype " + dtype_name(tensor.scalar_type());
}

/// Returns a dense tensor on the CPU with the values of `tensor`.
inline at::Tensor written_values(const at::Tensor& tensor) {
  return tensor.detach().cpu().resolve_conj().resolve_neg();
}

/// Returns the text of a dict's key, a str or an int.
inline std::string key_text(const c10::IValue& key) {
  return key.isString() ? key.toStringRef() : std::to_string(key.toInt());
}

/// The nesting that a file may have. Destroying a value recurses as deep.
inline constexpr int nesting_limit = 64;

/// Returns a dictionary with values of any type, as LibTorch's unpickler makes it.
inline c10::impl::GenericDict new_dict() {
  return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
}
inline c10::impl::GenericList new_list() {
  return c10::impl::GenericList(c10::AnyType::get());
}

/// Returns `left * right` unless it overflows.
inline std::optional<std::uint64_t> product(std::uint64_t left, std::uint64_t right) {
  if (right != 0 && left > std::numeric_limits<std::uint64_t>::max() / right) return std::nullopt;
  return left * right;
}

/// Returns whether each of `count` bytes is the value of a bool.
inline bool are_bools(const void* bytes, std::uint64_t count) {
  const auto* begin = static_cast<const unsigned char*>(bytes);
  return std::all_of(begin, begin + count, [](unsigned char byte) { return byte <= 1; });
}

/// Reads the pickle of a torch.save file: dictionaries with keys of type str or int, lists, tuples, numbers,
/// strings, None, and tensors. Another object that torch.load(weights_only=True) reads becomes None. Refuses every
/// other opcode and global, and executes nothing.
class PickleReader {
 public:
  /// `archive` holds the storages. Both must outlive the reader.
  PickleReader(std::string_view bytes, caffe2::serialize::PyTorchStreamReader& archive)
      : bytes_(bytes), archive_(archive) {}

  /// Returns the pickled value. Throws CheckpointError with the offset in the pickle.
  c10::IValue run() {
    if (take(2) != std::string_view("\x80\x02", 2)) refuse("it is no pickle of protocol 2");
    for (;;) {
      const char opcode = take(1)[0];
      if (opcode == '.') break;
      execute(opcode);
    }
    if (stack_.size() != 1 || !marks_.empty()) refuse("it does not end with one value");
    const Container* whole = container_of(stack_.back());
    if (stack_.back().isCapsule() || (whole && whole->symbols))
      refuse("a class, a function or a storage is no value of a state dict");
    return stack_.back();
  }

 private:
  using Values = std::vector<c10::IValue>;

  /// A global, as "module\nname", or the key of a storage. Not part of a result.
  struct Symbol : torch::CustomClassHolder {
    explicit Symbol(std::string_view name) : name(name) {}
    std::string name;
  };
  /// A list, dict or tuple.
  struct Container {
    int depth = 1;
    bool closed = false;   // another value refers to it: changed again, it could contain itself
    bool symbols = false;  // a tuple of arguments, perhaps
  };

  [[noreturn]] void refuse(const std::string& what) const {
    const std::string entry = place();
    throw CheckpointError(
        detail::formatted("at offset {} of its pickle{}: {}; it is damaged, or holds more than "
                          "tensors, numbers, strings, lists, tuples and dicts of these",
                          at_, entry.empty() ? "" : ", in " + entry, what));
  }
  /// Returns the entry that is being read, such as "['optimizer']['state']".
  [[nodiscard]] std::string place() const {
    std::string text;
    const auto add = [&](const c10::IValue& key) {
      if (key.isInt()) text += formatted("[{}]", key.toInt());
      if (key.isString()) text += formatted("['{}']", key.toStringRef().substr(0, 100));
    };
    bool named = false;                                          // the innermost
    const std::size_t top = stack_.size() - (setting_ ? 1 : 0);  // without the dict that is given an item
    for (std::size_t i = 0; i < marks_.size(); ++i) {
      const std::size_t end = i + 1 < marks_.size() ? std::max(marks_[i + 1], marks_[i] + 1) - 1 : top;
      const bool in_dict = marks_[i] > 0 && stack_[marks_[i] - 1].isGenericDict();
      named = in_dict && end > marks_[i] && (end - marks_[i]) % 2 == 1;
      if (named) add(stack_[end - 1]);
    }
    const std::size_t size = stack_.size();  // a dict of one entry has no mark
    if (setting_)
      add(*setting_);
    else if (!named && size >= 2 && stack_[size - 2].isGenericDict() &&
             (marks_.empty() || marks_.back() + 2 <= size))
      add(stack_[size - 1]);
    return text;
  }

  std::string_view take(std::size_t count) {
    if (count > bytes_.size() - next_) refuse("it is cut short");
    at_ = std::exchange(next_, next_ + count);
    return bytes_.substr(at_, count);
  }
  template <class Number>
  Number number() {
    return little_endian<Number>(take(sizeof(Number)));
  }
  std::string_view line() {
    const std::size_t end = bytes_.find('\n', next_);
    if (end == std::string_view::npos || end - next_ > 200) refuse("a global's name does not end");
    return take(end + 1 - next_).substr(0, end - at_);
  }

  void push(c10::IValue value) { stack_.push_back(std::move(value)); }
  Container& push_container(c10::IValue value) {
    push(std::move(value));
    return containers_[stack_.back().internalToPointer()] = {};
  }
  Values pop(std::size_t count) {
    if (stack_.size() - (marks_.empty() ? 0 : marks_.back()) < count)
      refuse("it takes a value where there is none");
    const auto first = stack_.end() - static_cast<std::ptrdiff_t>(count);
    Values values(std::make_move_iterator(first), std::make_move_iterator(stack_.end()));
    stack_.erase(first, stack_.end());
    return values;
  }
  Values pop_to_mark() {
    if (marks_.empty()) refuse("it takes values where there is no mark");
    Values values = pop(stack_.size() - marks_.back());
    marks_.pop_back();
    return values;
  }

  void execute(char opcode) {
    switch (opcode) {
      case '(':
        return marks_.push_back(stack_.size());
      case 'N':
        return push({});
      case '\x88':
      case '\x89':
        return push(opcode == '\x88');
      case 'J':
        return push(std::int64_t{number<std::int32_t>()});
      case 'K':
        return push(std::int64_t{number<std::uint8_t>()});
      case 'M':
        return push(std::int64_t{number<std::uint16_t>()});
      case '\x8a':
        return push(long_integer());
      case 'G':
        return push(std::bit_cast<double>(big_endian<std::uint64_t>(take(8))));
      case 'X':
        return push(std::string(take(number<std::uint32_t>())));
      case 'U':
        return push(std::string(take(number<std::uint8_t>())));
      case '\x8f':
        return push({});  // a set
      case '}':
        return static_cast<void>(push_container(new_dict()));
      case ']':
        return static_cast<void>(push_container(new_list()));
      case ')':
        return push_tuple({});
      case '\x85':
      case '\x86':
      case '\x87':
        return push_tuple(pop(static_cast<std::size_t>(opcode - '\x84')));
      case 't':
        return push_tuple(pop_to_mark());
      case 's':
        return set_items(pop(2));
      case 'u':
        return set_items(pop_to_mark());
      case 'a':
        return append(pop(1));
      case 'e':
        return append(pop_to_mark());
      case 'q':
        return put(number<std::uint8_t>());
      case 'r':
        return put(number<std::uint32_t>());
      case 'h':
        return get(number<std::uint8_t>());
      case 'j':
        return get(number<std::uint32_t>());
      case 'c':
        return push_global();
      case 'Q':
        return push_storage(pop(1)[0]);
      case 'R':
      case '\x81':
        return reduce(pop(2));
      case 'b':
        return build(pop(1)[0]);
      default:
        refuse(detail::formatted("the opcode {} is not one of a state dict",
                                 static_cast<unsigned>(static_cast<unsigned char>(opcode))));
    }
  }

  c10::IValue long_integer() {
    const std::size_t size = number<std::uint8_t>();
    std::string bytes(take(size));
    if (size > 8) return {};
    bytes.resize(
        8, size > 0 && (bytes.back() & 0x80) != 0 ? '\xFF' : '\0');  // two's complement; char may be unsigned
    return little_endian<std::int64_t>(bytes);
  }

  void put(std::uint32_t index) {
    if (stack_.size() == (marks_.empty() ? 0 : marks_.back())) refuse("it keeps a value where there is none");
    memo_[index] = stack_.back();
  }
  void get(std::uint32_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) refuse("it refers to a value that it has not kept");
    if (Container* container = container_of(found->second)) container->closed = true;
    push(found->second);
  }

  Container* container_of(const c10::IValue& value) {
    const bool is_one = value.isGenericDict() || value.isList() || value.isTuple();
    return is_one ? &containers_.at(value.internalToPointer()) : nullptr;
  }
  /// Accounts for `value` inside `outer`.
  void enter(Container& outer, const c10::IValue& value) {
    outer.symbols = outer.symbols || value.isCapsule();
    if (Container* inner = container_of(value)) {
      inner->closed = true;
      outer.symbols = outer.symbols || inner->symbols;
      outer.depth = std::max(outer.depth, inner->depth + 1);
    }
    if (outer.depth > nesting_limit)
      refuse(detail::formatted("its values are nested more than {} deep", nesting_limit));
  }
  /// Accounts for an item of a dict or list. A class, a function or a storage is None.
  void enter_item(Container& outer, c10::IValue& value) {
    const Container* inner = container_of(value);
    if (value.isCapsule() || (inner && inner->symbols)) value = {};
    enter(outer, value);
  }
  void push_tuple(Values values) {
    Container tuple{.closed = true};
    for (const c10::IValue& value : values) enter(tuple, value);
    push_container(c10::ivalue::Tuple::create(std::move(values))) = tuple;
  }
  /// Returns the dict or list on top of the stack.
  Container& open_container(bool dict) {
    const bool good = !stack_.empty() && (dict ? stack_.back().isGenericDict() : stack_.back().isList());
    if (!good) refuse(dict ? "it sets items of what is no dict" : "it appends to what is no list");
    Container& container = *container_of(stack_.back());
    if (container.closed) refuse("a list or dict contains itself");
    return container;
  }
  void set_items(Values items) {
    if (items.size() % 2 != 0) refuse("a dict has a key without a value");
    Container& outer = open_container(/*dict=*/true);

    c10::impl::GenericDict dict = stack_.back().toGenericDict();
    for (std::size_t i = 0; i < items.size(); i += 2) {
      if (!items[i].isString() && !items[i].isInt())
        continue;  // no state dict needs it, and IValue has no such dict
      setting_ = &items[i];
      enter_item(outer, items[i + 1]);
      if (!dict.insert(items[i], std::move(items[i + 1])).second)
        refuse(detail::formatted("a dict has the key {} twice", key_text(items[i])));
    }
    setting_ = nullptr;
  }
  void append(Values items) {
    Container& outer = open_container(/*dict=*/false);
    c10::impl::GenericList list = stack_.back().toList();
    for (c10::IValue& item : items) {
      enter_item(outer, item);
      list.push_back(std::move(item));
    }
  }

  void push_symbol(std::string_view name) {
    push(c10::IValue::make_capsule(c10::make_intrusive<Symbol>(name)));
  }
  const std::string& symbol_of(const c10::IValue& value, const char* otherwise) const {
    if (!value.isCapsule()) refuse(otherwise);
    return static_cast<const Symbol&>(*value.toCapsule()).name;
  }
  void push_global() {
    const std::string_view module = line(), name = line(),
                           text(module.data(), module.size() + 1 + name.size());
    static constexpr std::array<std::string_view, 4> functions{
        "collections\nOrderedDict", "collections\nCounter", "torch._utils\n_rebuild_tensor_v2",
        "torch._utils\n_rebuild_parameter"};
    static constexpr std::array<std::string_view, 4> skipped{"__builtin__\nset", "__builtin__\ncomplex",
                                                             "__builtin__\nbytearray", "_codecs\nencode"};
    static constexpr std::array<std::string_view, 9> skipped_modules{
        // layouts, dtypes, rare tensors
        "torch",         "torch._tensor", "torch._utils", "torch.nn.parameter", "torch.serialization",
        "torch.storage", "torch.cuda",    "torch.sparse", "torch.cuda.sparse"};
    const auto in = [](const auto& names, std::string_view one) {
      return std::find(names.begin(), names.end(), one) != names.end();
    };
    if (in(functions, text) || class_of(text) != nullptr) return push_symbol(text);
    if (!in(skipped, text) && !in(skipped_modules, module))
      refuse(detail::formatted("it holds an object of '{}.{}'", module, name));
    push({});
  }
  static const FileDtype* class_of(std::string_view global) {
    return global.size() > 6 && global.starts_with("torch\n")
               ? file_dtype(&FileDtype::storage, global.substr(6))
               : nullptr;
  }

  /// Replaces ("storage", class, key, location, count) by the storage. Every storage is read to the CPU.
  void push_storage(const c10::IValue& value) {
    const Values parts = elements_of(value, 5, "a storage");
    if (parts[1].isNone()) return push({});
    const FileDtype* kind = class_of(symbol_of(parts[1], "a storage has no class"));
    if (!parts[0].isString() || parts[0].toStringRef() != "storage" || kind == nullptr ||
        !parts[2].isString() || !parts[4].isInt() || parts[4].toInt() < 0)
      refuse("a storage has no class, key and size");
    const std::string& key = parts[2].toStringRef();
    const std::int64_t count = parts[4].toInt();
    const bool plain = !key.empty() && key.size() <= 40 && std::all_of(key.begin(), key.end(), [](char c) {
      return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    });
    if (!plain) refuse("a storage's key is no name of a record");
    at::Tensor& storage = storages_[key];
    if (!storage.defined())
      storage = read_storage("data/" + key, kind->type, static_cast<std::uint64_t>(count));
    if (storage.scalar_type() != kind->type || storage.numel() != count)
      refuse(detail::formatted("the storage '{}' has two types or sizes", key));
    push_symbol(key);
  }

  at::Tensor read_storage(const std::string& record, at::ScalarType type, std::uint64_t count) const {
    if (!archive_.hasRecord(record)) refuse(detail::formatted("the record '{}' is missing", record));
    const std::uint64_t size = archive_.getRecordSize(record);
    if (product(count, c10::elementSize(type)) != size)
      refuse(detail::formatted("the record '{}' has {} bytes, which are not {} elements of {}", record, size,
                               count, dtype_name(type)));
    const at::Tensor storage = at::empty({static_cast<std::int64_t>(count)}, type);
    if (size == 0) return storage;
    archive_.getRecord(record, storage.mutable_data_ptr(), size);
    if (type == at::kBool && !are_bools(storage.const_data_ptr(), size))
      refuse(detail::formatted("the record '{}' has a bool that is neither 0 nor 1", record));
    return storage;
  }

  Values elements_of(const c10::IValue& tuple, std::size_t count, const char* of) const {
    if (!tuple.isTuple() || tuple.toTupleRef().size() != count)
      refuse(detail::formatted("{} has another number of parts", of));
    return tuple.toTupleRef().elements().vec();
  }
  std::vector<std::int64_t> integers_of(const c10::IValue& tuple) const {
    std::vector<std::int64_t> integers;
    if (!tuple.isTuple() || tuple.toTupleRef().size() > 64) refuse("a shape has another number of parts");
    for (const c10::IValue& value : tuple.toTupleRef().elements()) {
      if (!value.isInt() || value.toInt() < 0) refuse("a shape or stride is no number from 0");
      integers.push_back(value.toInt());
    }
    return integers;
  }

  void reduce(const Values& call) {
    if (call[0].isNone()) return push({});
    const std::string& function = symbol_of(call[0], "it calls what is no function");
    if (function == "collections\nOrderedDict") {
      elements_of(call[1], 0, "an OrderedDict");
      push_container(new_dict());
    } else if (function == "collections\nCounter") {
      push(elements_of(call[1], 1, "a Counter")[0]);
      if (!stack_.back().isGenericDict()) refuse("a Counter has no dict");
    } else if (function == "torch._utils\n_rebuild_tensor_v2") {
      const bool lazy = call[1].isTuple() && call[1].toTupleRef().size() == 7;  // conjugated or negated
      push(lazy ? c10::IValue() : c10::IValue(tensor_of(call[1])));
    } else if (function == "torch._utils\n_rebuild_parameter") {
      push(elements_of(call[1], 3, "a parameter")[0]);
      if (!stack_.back().isTensor() && !stack_.back().isNone()) refuse("a parameter has no tensor");
    } else {
      refuse("it calls a class of storages");
    }
  }

  /// (storage, offset, shape, strides, requires_grad, hooks).
  at::Tensor tensor_of(const c10::IValue& arguments) const {
    const Values parts = elements_of(arguments, 6, "a tensor");
    const auto found = storages_.find(symbol_of(parts[0], "a tensor has no storage"));
    if (found == storages_.end()) refuse("a tensor has no storage");
    const at::Tensor& storage = found->second;
    const std::vector<std::int64_t> shape = integers_of(parts[2]), strides = integers_of(parts[3]);
    if (!parts[1].isInt() || parts[1].toInt() < 0 || shape.size() != strides.size())
      refuse("a tensor has no offset, or not as many strides as sizes");
    const std::int64_t offset = parts[1].toInt();
    // The index after its last element, and the number of its elements, which 0 in any size makes 0.
    std::optional<std::uint64_t> end = static_cast<std::uint64_t>(offset), count = 1;
    const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    for (std::size_t i = 0; i < shape.size() && end && count && !empty; ++i) {
      const auto size = static_cast<std::uint64_t>(shape[i]), stride = static_cast<std::uint64_t>(strides[i]);
      const auto span = product(size - 1, stride);
      end = span && *span <= most - *end ? std::optional(*end + *span) : std::nullopt;
      count = product(*count, size);
      if (count && *count > most / 16) count = std::nullopt;
    }
    const auto length = static_cast<std::uint64_t>(storage.numel());
    if (!end || !count || (empty ? *end > length : *end >= length))
      refuse(detail::formatted("a tensor {} with strides {} at {} does not fit its storage of {} elements",
                               shape_text(shape), shape_text(strides), offset, length));
    return at::empty({0}, storage.options()).set_(storage.storage(), offset, shape, strides);
  }

  /// Skips the attributes of an OrderedDict, such as `_metadata`, the versions of the modules' classes.
  void build(const c10::IValue& attributes) {
    if (!stack_.empty() && stack_.back().isNone()) return;  // skipped itself
    open_container(/*dict=*/true);
    if (!attributes.isGenericDict()) refuse("a dict has attributes that are no dict");
  }

  std::string_view bytes_;
  caffe2::serialize::PyTorchStreamReader& archive_;
  std::size_t next_ = 0, at_ = 0;
  Values stack_;
  const c10::IValue* setting_ = nullptr;  // the key of the item that a dict is given
  std::vector<std::size_t> marks_;        // the stack's sizes
  std::unordered_map<std::uint32_t, c10::IValue> memo_;
  std::unordered_map<const void*, Container> containers_;
  std::unordered_map<std::string, at::Tensor> storages_;
};

/// Writes the pickle of a torch.save file, and collects the storages.
class PickleWriter {
 public:
  /// Throws UsageError for a value that `torch.load(weights_only=True)` refuses, with its place.
  explicit PickleWriter(const c10::IValue& value) {
    text_ += "\x80\x02";
    write(value, "", 0);
    text_ += '.';
  }
  [[nodiscard]] const std::string& text() const { return text_; }
  /// The storages, which the pickle numbers from 0, as flat tensors on the CPU.
  [[nodiscard]] const std::vector<at::Tensor>& storages() const { return storages_; }

 private:
  void write_integer(std::int64_t number) {
    if (number >= std::numeric_limits<std::int32_t>::min() &&
        number <= std::numeric_limits<std::int32_t>::max()) {
      text_ += 'J';
      append_little_endian(text_, static_cast<std::int32_t>(number));
    } else {
      text_ += "\x8a\x08";
      append_little_endian(text_, number);
    }
  }
  void write_text(std::string_view text, const std::string& place) {
    if (text.size() > std::numeric_limits<std::uint32_t>::max()) refuse(place, "a str of 4 GiB");
    if (valid_utf8(text) != text) refuse(place, "a str that is not UTF-8");
    text_ += 'X';
    append_little_endian(text_, static_cast<std::uint32_t>(text.size()));
    text_ += text;
  }
  [[noreturn]] static void refuse(const std::string& place, const std::string& what) {
    throw UsageError(detail::formatted(
        "torch_save: the value{}{} is {}, which torch.load(weights_only=True) does not take: save tensors, "
        "numbers, strings, lists, tuples, and dicts with keys of type str or int",
        place.empty() ? "" : " of ", place, what));
  }

  void write(const c10::IValue& value, const std::string& place, int depth) {
    if (depth >= nesting_limit) refuse(place, detail::formatted("nested more than {} deep", nesting_limit));
    if (value.isNone()) {
      text_ += 'N';
    } else if (value.isBool()) {
      text_ += value.toBool() ? '\x88' : '\x89';
    } else if (value.isInt()) {
      write_integer(value.toInt());
    } else if (value.isDouble()) {
      text_ += 'G';
      append_big_endian(text_, std::bit_cast<std::uint64_t>(value.toDouble()));
    } else if (value.isString()) {
      write_text(value.toStringRef(), place);
    } else if (value.isTensor()) {
      write_tensor(value.toTensor(), place);
    } else if (value.isList()) {
      text_ += "](";
      for (const c10::IValue& element : value.toListRef()) write(element, place, depth + 1);
      text_ += 'e';
    } else if (value.isTuple()) {
      text_ += '(';
      for (const c10::IValue& element : value.toTupleRef().elements()) write(element, place, depth + 1);
      text_ += 't';
    } else if (value.isGenericDict()) {
      write_dict(value.toGenericDict(), place, depth);
    } else {
      refuse(place, detail::formatted("of type {}", value.tagKind()));
    }
  }

  void write_dict(const c10::impl::GenericDict& dict, const std::string& place, int depth) {
    text_ += "}(";
    for (const auto& item : dict) {
      std::string inside = place;
      if (item.key().isString())
        inside += detail::formatted("['{}']", item.key().toStringRef());
      else if (item.key().isInt())
        inside += detail::formatted("[{}]", item.key().toInt());
      else
        refuse(place, "a dict with keys of another type");
      write(item.key(), inside, depth + 1);
      write(item.value(), inside, depth + 1);
    }
    text_ += 'u';
  }

  void write_tensor(const at::Tensor& given, const std::string& place) {
    if (!given.defined()) {
      text_ += 'N';
      return;
    }
    if (const std::string why = unwritable(given, &FileDtype::storage); !why.empty())
      refuse(place, "a tensor that is " + why);
    const at::Tensor tensor = written_values(given);
    const auto [number, elements] = storage_of(tensor);

    text_ += "ctorch._utils\n_rebuild_tensor_v2\n((";
    write_text("storage", place);
    text_ += "ctorch\n";
    text_ += file_dtype(&FileDtype::type, tensor.scalar_type())->storage;
    text_ += '\n';
    write_text(std::to_string(number), place);
    write_text("cpu", place);
    write_integer(elements);
    text_ += "tQ";
    write_integer(tensor.storage_offset());
    write_integers(tensor.sizes());
    write_integers(tensor.strides());
    text_ += "\x89";  // requires_grad, which a state dict leaves to the model
    text_ += "ccollections\nOrderedDict\n)RtR";
  }
  void write_integers(c10::IntArrayRef integers) {
    text_ += '(';
    for (const std::int64_t integer : integers) write_integer(integer);
    text_ += 't';
  }

  /// Returns the number of the tensor's storage, and how many elements it has. Tensors with a common storage,
  /// such as tied weights, share it in the file, too.
  std::pair<std::size_t, std::int64_t> storage_of(const at::Tensor& tensor) {
    const auto elements = static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.element_size());
    const auto [found, is_new] =
        numbers_.emplace(std::pair(tensor.storage().unsafeGetStorageImpl(), tensor.scalar_type()),
                         std::pair(storages_.size(), elements));
    if (is_new)
      storages_.push_back(
          at::empty({0}, tensor.options()).set_(tensor.storage(), 0, {elements}, {std::int64_t{1}}));
    return found->second;
  }

  std::string text_;
  std::vector<at::Tensor> storages_;
  std::map<std::pair<const c10::StorageImpl*, at::ScalarType>, std::pair<std::size_t, std::int64_t>> numbers_;
};

/// Returns the bytes of a file that torch.load(weights_only=True) reads.
inline std::string pickled(const c10::IValue& value) {
  const PickleWriter pickle(value);
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  archive.writeRecord("data.pkl", pickle.text().data(), pickle.text().size());
  archive.writeRecord("byteorder", "little", 6);
  for (std::size_t i = 0; i < pickle.storages().size(); ++i) {
    const at::Tensor& storage = pickle.storages()[i];
    archive.writeRecord(detail::formatted("data/{}", i), storage.const_data_ptr(), storage.nbytes());
  }
  archive.writeEndOfFile();
  return bytes;
}

/// Returns the value in the bytes of torch.save's file. Throws CheckpointError if they are damaged (see
/// check_archive) or hold something else.
inline c10::IValue unpickled(std::string_view bytes) {
  if (bytes.starts_with(std::string_view("\x80\x02\x8a\x0al\xfc\x9c", 7)))
    throw CheckpointError(
        "it has the format of torch.save before PyTorch 1.6: load it in Python and save it again");
  if (!bytes.starts_with("PK\3\4"))
    throw CheckpointError("it is no file of torch.save: save what model.state_dict() returns");
  check_archive(bytes);
  caffe2::serialize::PyTorchStreamReader archive(std::make_shared<MemoryReader>(bytes));
  if (archive.hasRecord("constants.pkl"))
    throw CheckpointError(
        "it is an archive of LibTorch, such as torch::save and save_model write, and none of Python's "
        "torch.save: load it with load_model or a Trainer, or with torch.jit.load in Python");
  if (!archive.hasRecord("data.pkl"))
    throw CheckpointError("it has no data.pkl, so that torch.save did not write it");
  const auto text_of = [&](const std::string& record) {
    const auto [content, size] = archive.getRecord(record);
    return std::string(static_cast<const char*>(content.get()), size);
  };
  if (archive.hasRecord("byteorder") && text_of("byteorder") != "little")
    throw CheckpointError("it was written on a machine with another byte order: save it again on this one");
  const std::string pickle = text_of("data.pkl");
  if (bytes.substr(archive.getRecordOffset("data.pkl"), pickle.size()) != pickle)
    throw CheckpointError("its data.pkl is compressed, as torch.save writes none: save it again");
  return PickleReader(pickle, archive).run();
}

}  // namespace lockstep::inline v0_1::detail
