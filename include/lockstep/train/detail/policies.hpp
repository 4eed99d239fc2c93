#pragma once

#include "lockstep/data/dataset.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/train/detail/training_step.hpp"
#include "lockstep/train/trainer_options.hpp"

/// The policies of a Trainer: their kinds, checks and construction.
namespace lockstep::inline v0_1::detail {

enum class PolicyKind {
  model,
  sampler,
  communicator,
  precision,
  // Extras. A Trainer stores them in one tuple.
  optimizer,
  schedule,
  check,
  hook,
  // Not policies.
  several,
  callback,
  none
};

template <class P>
consteval PolicyKind kind_of() {
  // Model is tested first: a test whether a generic forward models Precision could fail to compile.
  if constexpr (Model<P>)
    return PolicyKind::model;
  else if constexpr (Sampler<P>)
    return PolicyKind::sampler;
  else if constexpr (Communicator<P>)
    return PolicyKind::communicator;
  else if constexpr (Precision<P>)
    return PolicyKind::precision;
  else if constexpr (OptimizerFactory<P> + Schedule<P> + GradientCheck<P> + HookPolicy<P> + Callback<P> > 1)
    return PolicyKind::several;
  else
    return OptimizerFactory<P> ? PolicyKind::optimizer
           : Schedule<P>       ? PolicyKind::schedule
           : GradientCheck<P>  ? PolicyKind::check
           : HookPolicy<P>     ? PolicyKind::hook
           : Callback<P>       ? PolicyKind::callback
                               : PolicyKind::none;
}
constexpr bool is_extra(PolicyKind kind) {
  return kind >= PolicyKind::optimizer && kind <= PolicyKind::hook;
}

template <PolicyKind kind, class Default, class... Policies>
struct SelectPolicy : std::type_identity<Default> {};
template <PolicyKind kind, class Default, class First, class... Rest>
struct SelectPolicy<kind, Default, First, Rest...>
    : std::conditional_t<kind_of<First>() == kind, std::type_identity<First>,
                         SelectPolicy<kind, Default, Rest...>> {};

// Stands for the members of a Trainer with wrong policies: a static_assert of CheckedPolicies is the only error.
struct Nothing {
  template <class... Given>
  explicit Nothing(Given&&...) {}
};

// The types of a Trainer's policies, with defaults for the absent ones.
template <class... Policies>
struct PolicyTypes {
  static constexpr int count(PolicyKind kind) { return (int{kind_of<Policies>() == kind} + ... + 0); }
  static constexpr bool has(PolicyKind kind) { return count(kind) > 0; }

  static constexpr bool complete() { return lockstep::Model<Model>; }

  using Model = typename SelectPolicy<PolicyKind::model, Nothing, Policies...>::type;
  using Sampler = typename SelectPolicy<PolicyKind::sampler, DefaultSampler, Policies...>::type;
  using Comm = typename SelectPolicy<PolicyKind::communicator, DefaultComm, Policies...>::type;
  using Precision = typename SelectPolicy<PolicyKind::precision, DefaultPrecision, Policies...>::type;
  using Hook = typename SelectPolicy<PolicyKind::hook, AllReduceHook, Policies...>::type;
  using Extras = decltype(std::tuple_cat(
      std::declval<
          std::conditional_t<is_extra(kind_of<Policies>()), std::tuple<Policies>, std::tuple<>>>()...));
};

// Diagnoses one policy. A template of its own, so that every compiler names the type beside the sentence.
template <class Policy>
constexpr bool checked_policy() {
  static_assert(kind_of<Policy>() != PolicyKind::none,
                "lockstep: a policy of a Trainer models none of Model, Sampler, Communicator, Precision, "
                "OptimizerFactory, Schedule, GradientCheck and CommunicationHook");
  return true;
}

// Diagnoses a Trainer's template arguments. The Trainer derives from this class, so that this message comes first.
template <class... Policies>
struct CheckedPolicies {
  using Types = PolicyTypes<Policies...>;
  using Comm = typename Types::Comm;
  using PrecisionType = typename Types::Precision;

  static_assert((checked_policy<Policies>() && ...));
  static_assert(((kind_of<Policies>() != PolicyKind::callback) && ...),
                "lockstep: a callback is no policy of a Trainer: pass it to fit, after the loss");
  static_assert(((kind_of<Policies>() != PolicyKind::several) && ...),
                "lockstep: an extra of a Trainer models more than one of OptimizerFactory, Schedule, "
                "GradientCheck, CommunicationHook and the callbacks: split it into one each");
  static_assert(((kind_of<Policies>() > PolicyKind::hook || Types::count(kind_of<Policies>()) == 1) && ...),
                "lockstep: two policies of a Trainer model the same concept: give one of each kind");
  static_assert(
      Model<typename Types::Model> || ((kind_of<Policies>() == PolicyKind::none) || ...),
      "lockstep: a Trainer has no model: give it a class derived from torch::nn::Module or the holder that "
      "TORCH_MODULE makes of one, by value or as std::in_place_type<Net>");
  static_assert(
      !(ScalingPrecision<PrecisionType> && Types::has(PolicyKind::check)),
      "lockstep: a GradientCheck, such as CheckFinite, refuses gradients that are not finite, which a "
      "precision that scales losses, such as Fp16, meets as part of its work: leave the check out");
  static_assert(
      !ScalingPrecision<PrecisionType> || Types::Hook::propagates_nan ||
          AgreeingPrecision<PrecisionType, Comm>,
      "lockstep: a communication hook that keeps infinities from the other ranks, such as PowerSgdHook, "
      "needs a precision whose ranks agree on the steps to leave out: give it agree(optimizer, comm), as "
      "Fp16 has");
};

template <class Model, class Comm, class Data, class Loss, class... Callbacks>
struct CheckedFit {
  static constexpr bool good() {
    constexpr bool trainable = Dataset<Data> || BatchStream<Data>;
    static_assert(
        trainable,
        "lockstep: fit trains on a dataset, which has size() and get(i) or get_batch(indices), or on a "
        "stream, whose next() returns a std::optional batch; the members of a const one are const");
    if constexpr (trainable) {
      using Batch = BatchFrom<Data>;
      constexpr bool callable = std::invocable<Loss&, Model&, Batch&>;
      constexpr bool a_loss = LossFunction<Loss, Model, Batch>;
      constexpr bool all_callbacks = (Callback<Callbacks> && ...);
      static_assert(
          callable,
          "lockstep: the loss is called as loss(model, batch), with the Trainer's model and a batch of the "
          "dataset");
      static_assert(a_loss || !callable,
                    "lockstep: the loss returns neither a tensor, the mean over the batch, nor a Mean{sum, "
                    "count}, nor a std::tuple of one of them and of parts with different names");
      static_assert(all_callbacks,
                    "lockstep: after the loss, fit takes callbacks, such as OnStep{f}, OnEpochStart{f}, "
                    "OnEpoch{f} and OnGradients{f}");
      return a_loss && all_callbacks && (checked_callback<Callbacks, Comm>() && ...);
    } else {
      return false;
    }
  }
};

template <class Types>
struct MemberTypes {
  using Model = Nothing;
  using Ddp = Nothing;
  using Step = Nothing;
};
template <class Types>
requires(Types::complete()) struct MemberTypes<Types> {
  using Model = ModelHandle<typename Types::Model>;
  using Ddp = DistributedDataParallel<typename Types::Model, typename Types::Comm, typename Types::Hook>;
  using Step = TrainingStep<typename Types::Model, typename Types::Comm, torch::optim::Optimizer,
                            typename Types::Precision, typename Types::Hook>;
};

// The policy that an argument of a Trainer stands for: `std::in_place_type<T>` for T, a value for its type.
template <class T>
struct PolicyOfArgument : std::type_identity<T> {};
template <class T>
struct PolicyOfArgument<std::in_place_type_t<T>> : std::type_identity<T> {};

template <class T, class... Types>
inline constexpr bool one_of = (std::same_as<T, Types> || ...);

// A sampler cannot be passed as a value, since each `fit` constructs it for its dataset.
template <class Given, class... Policies>
inline constexpr bool fits_policies =
    one_of<typename PolicyOfArgument<Given>::type, Policies...> && !Sampler<Given>;

// Diagnoses one value that the constructor of a Trainer was given, and names its type as checked_policy does.
template <class Given, class... Policies>
constexpr bool checked_value() {
  static_assert(fits_policies<Given, Policies...>,
                "lockstep: a Trainer was given a value of a type that is none of its policies");
  return true;
}

// Moves out the argument of type T among `given`, or returns `fallback(std::type_identity<T>)`, which is
// compiled only if there is no such argument.
template <class T, class Fallback, class... Given>
T pick(Fallback&& fallback, Given&... given) {
  if constexpr (one_of<T, Given...>)
    return std::move(std::get<T&>(std::tie(given...)));
  else
    return fallback(std::type_identity<T>{});
}

// A fallback for `pick` that default-constructs a policy.
struct MakeDefault {
  template <class T>
  T operator()(std::type_identity<T>) const {
    static_assert(
        std::default_initializable<T>,
        "lockstep: this policy of a Trainer has no default constructor: pass a value of it after the "
        "options");
    return T();
  }
};

struct MakeSeeded {
  std::uint64_t seed;
  template <class M>
  M operator()(std::type_identity<M>) const {
    static_assert(
        DefaultConstructibleModel<M>,
        "lockstep: this model has no default constructor: pass one to the Trainer after its options");
    at::manual_seed(seed);
    return M();
  }
};

/// Moves the model to the device of the communicator's tensors, unless its parameters are on several GPUs.
/// Call before anything holds its parameters.
template <class M, class Comm>
M placed(M model, const Comm& comm) {
  if constexpr (DeviceCommunicator<Comm> && Model<M>) {
    const auto parameters = module_of(model).parameters();
    const bool spread = std::any_of(parameters.begin(), parameters.end(), [&](const at::Tensor& parameter) {
      return !parameter.is_cpu() && parameter.device() != parameters[0].device();
    });
    if (!spread) module_of(model).to(comm.tensor_device());
  }
  return model;
}

/// Moves out the communication hook among the extras, or default-constructs one.
template <class Hook, class... Extras>
Hook take_hook(std::tuple<Extras...>& extras) {
  return std::apply([](auto&... extra) { return pick<Hook>(MakeDefault{}, extra...); }, extras);
}

/// Constructs the extras: each is moved from the argument of its type, or default-constructed.
template <class... Extras, class... Given>
std::tuple<Extras...> make_extras(std::type_identity<std::tuple<Extras...>>, Given&... given) {
  return std::tuple<Extras...>(pick<Extras>(MakeDefault{}, given...)...);
}

/// Calls `validated`. Also throws UsageError if `lr` is set together with an OptimizerFactory.
inline const TrainerOptions& validated_beside(bool has_optimizer, const TrainerOptions& options) {
  if (has_optimizer && options.lr)
    throw UsageError(
        detail::formatted("lr is {}, but MakeOptimizer sets the learning rate: set it there", *options.lr));
  return validated(options);
}

template <class... Extras>
std::unique_ptr<torch::optim::Optimizer> create_optimizer(std::tuple<Extras...>& extras,
                                                          const std::vector<NamedTensor>& parameters,
                                                          const TrainerOptions& options) {
  if constexpr ((OptimizerFactory<Extras> || ...)) {
    std::unique_ptr<torch::optim::Optimizer> made;
    const auto make = [&]<class E>([[maybe_unused]] E& extra) {
      if constexpr (OptimizerFactory<E>) made = extra.make_optimizer(parameters);
    };
    std::apply([&](auto&... extra) { (make(extra), ...); }, extras);
    return made;
  } else {
    return std::make_unique<SGD>(tensor_list(parameters), SGDOptions{.lr = options.lr.value_or(1e-3)});
  }
}

}  // namespace lockstep::inline v0_1::detail
