// Operators of torch/operators.py once more, in C++: what a call costs the host is several times less
// where nothing is left to decide.
//
// Python decides, and checks. It describes the ops and the norms, sees the first call of each kind
// (device, element types, shape, strides of rows, options) and tells `remember` what that call
// launches; later ones launch it from here, on PyTorch's current stream. Rows with more than two
// strides are copied. Whatever is unusual (memory that was freed, misaligned elements) goes to Python
// each time.

#include <torch/library.h>

#include <map>
#include <sstream>

#include "torch_autograd.h"
#include "torch_operators.h"
#include "torch_warnings.h"

namespace {

using at::Tensor;
using c10::DispatchKey;
using iree_lnbwd::Given;
using iree_lnbwd::Norm;
using iree_lnbwd::Op;
using iree_lnbwd::Operand;
using iree_lnbwd::Options;
using iree_lnbwd::calls;
using iree_lnbwd::norms;
using iree_lnbwd::ops;

// --- what Python says ------------------------------------------------------------------------

template <typename Value>
Value one_of(const std::string& word, std::initializer_list<std::pair<const char*, Value>> known) {
  for (const auto& [name, value] : known) {
    if (word == name) return value;
  }
  TORCH_CHECK(false, "operand: expected a word of operands.py, got ", word);
}

// From the words of a row of the table: name, kind, element, access, when.
Operand operand_of(const std::string& row) {
  std::istringstream words(row);
  std::string name, kind, element, access, when;
  TORCH_CHECK(words >> name >> kind >> element >> access >> when,
              "operand: expected five words, got ", row);
  using Extent = Operand::Extent;
  using Element = Operand::Element;
  return {name,
          one_of<Extent>(kind, {{"mn", Extent::cells}, {"m", Extent::rows}, {"n", Extent::columns}}),
          one_of<Element>(element, {{"dy", Element::dy},
                                    {"x", Element::x},
                                    {"acc", Element::acc},
                                    {"gamma", Element::gamma},
                                    {"beta", Element::beta},
                                    {"residual", Element::residual},
                                    {"z", Element::gate},
                                    {"copy", Element::copy},
                                    {"total", Element::total}}),
          access == "READ",
          when == "ASKED_FOR" || when == "ASKED_FOR_WITH_BIAS",
          when == "ASKED_FOR_WITH_BIAS",
          when == "RESIDUAL_GIVEN"};
}

// Describes an op; ops are numbered in the order in which they come.
int64_t describe_op(std::string name, bool is_backward, const std::string& data,
                    const std::vector<std::string>& arguments,
                    const std::vector<std::string>& results) {
  auto op = std::make_unique<Op>();
  op->name = std::move(name);
  op->is_backward = is_backward;
  TORCH_CHECK(arguments.size() <= iree_lnbwd::kMostArguments, op->name, ": expected at most ",
              iree_lnbwd::kMostArguments, " arguments, got ", arguments.size());
  for (const auto& row : arguments) {
    const int at = static_cast<int>(op->arguments.size());
    const Operand& operand = op->arguments.emplace_back(operand_of(row));
    if (operand.name == data) op->data = at;
    if (operand.element == Operand::Element::gamma) op->weight = at;
    if (operand.element == Operand::Element::beta) op->bias = at;
    if (operand.element == Operand::Element::residual) op->residual = at;
    if (operand.element == Operand::Element::gate) op->gate = at;
    if (operand.name == "rstd") op->rstd = at;
  }
  for (const auto& row : results) op->results.push_back(operand_of(row));
  TORCH_CHECK(op->results.size() <= iree_lnbwd::kMostMasked, op->name, ": expected at most ",
              iree_lnbwd::kMostMasked, " results, got ", op->results.size());
  ops().push_back(std::move(op));
  return static_cast<int64_t>(ops().size()) - 1;
}

const Op& op_of(int64_t number) {
  TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(ops().size()),
              "op: expected the number of an op that was described, got ", number);
  return *ops()[number];
}

// Python's side of `calls`; the tensors are those of one such call.
void remember(int64_t op, const c10::List<std::optional<Tensor>>& tensors,
              at::IntArrayRef normalized_shape, const c10::List<bool>& mask,
              std::optional<double> eps, double weight_offset,
              std::optional<at::ScalarType> result_dtype, std::optional<int64_t> rows_per_set,
              at::IntArrayRef driver, int64_t ones, int64_t scratch_bytes, at::IntArrayRef scratch,
              at::IntArrayRef launches, at::IntArrayRef graph, at::IntArrayRef strides) {
  const Op& described = op_of(op);
  TORCH_CHECK(tensors.size() == described.arguments.size(), "tensors: expected ",
              described.arguments.size(), " of ", described.name, ", got ", tensors.size());
  std::vector<std::optional<Tensor>> kept(tensors.begin(), tensors.end());
  Given given = {};
  for (size_t i = 0; i < kept.size(); ++i) given[i] = iree_lnbwd::pointer_to(kept[i]);
  TORCH_CHECK(given[described.data] != nullptr, "tensors: expected ",
              described.arguments[described.data].name, " among them, got none");
  const Options options = {normalized_shape, mask_of(described, mask), eps, weight_offset,
                           result_dtype,     rows_per_set};
  const auto numbers = [](at::IntArrayRef given) {
    return iree_lnbwd::Numbers{given.data(), given.size()};
  };
  auto call = iree_lnbwd::call_of(numbers(driver), ones, scratch_bytes, numbers(scratch),
                                  numbers(launches), numbers(graph));
  const auto kind = kind_of(described, given, options);
  if (!kind) return;
  if (!strides.empty()) {  // of all rows of a call, then of each argument
    TORCH_CHECK(strides.size() == 1 + 2 * described.arguments.size(),
                "strides: expected those of the arguments, got ", strides.size(), " numbers");
    iree_lnbwd::Layout layout;
    layout.inner_count = strides[0];
    for (size_t i = 0; i < described.arguments.size(); ++i) {
      layout.strides[i] = {static_cast<int32_t>(strides[1 + 2 * i]),
                           static_cast<int32_t>(strides[2 + 2 * i])};
    }
    if (!(kind->layout == layout)) return;  // Python knows such calls by others
    call.strided = true;
  }
  calls().add(*kind, std::move(call));
}

void forget() { calls().clear(); }

void tell_of_fork() { iree_lnbwd::is_forked() = true; }

// --- the operators, in place of Python's ----------------------------------------------------------

void put_in_place(const std::string& name, DispatchKey key, torch::CppFunction kernel) {
  static auto* const libraries = new std::map<DispatchKey, torch::Library>;
  const auto found =
      libraries->try_emplace(key, torch::Library::IMPL, "iree_lnbwd", key, __FILE__, __LINE__);
  const iree_lnbwd::WithoutOverrideWarning without;
  found.first->second.impl(name.c_str(), std::move(kernel));
}

template <class Kernel, class... Arguments>
void put_in_place(const std::string& name, std::initializer_list<DispatchKey> keys,
                  Arguments&&... arguments) {
  for (const DispatchKey key : keys) {
    put_in_place(name, key, torch::CppFunction::makeFromBoxedFunctor(
                                std::make_unique<Kernel>(arguments...)));
  }
}

void register_gradients(const std::string& name, int64_t op, bool takes_sets) {
  put_in_place<iree_lnbwd::Gradients>(name, {DispatchKey::CPU, DispatchKey::CUDA}, name, op_of(op),
                          takes_sets);
}

void register_norm(int64_t number, const std::string& name, int64_t op, const std::string& gradients,
                   int64_t gradients_op, const std::string& from_output, int64_t from_output_op,
                   bool takes_residual, bool own_forward, bool takes_sets, bool autocast) {
  TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(norms().size()) && !norms()[number],
              "number: expected one below ", norms().size(), " that is free, got ", number);
  norms()[number] =
      std::make_unique<const Norm>(name, op_of(op), gradients, op_of(gradients_op), from_output,
                                   op_of(from_output_op), takes_residual, own_forward, takes_sets);
  const Norm& norm = *norms()[number];
  put_in_place<iree_lnbwd::Forward>(name, {DispatchKey::CPU, DispatchKey::CUDA}, norm);
  put_in_place<iree_lnbwd::WithAutograd>(name, {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA}, number);
  if (autocast) put_in_place<iree_lnbwd::Autocast>(name, {DispatchKey::AutocastCUDA}, norm);
}

void register_output(int64_t norm, const std::string& name) {
  TORCH_CHECK(norm >= 0 && norm < static_cast<int64_t>(norms().size()) && norms()[norm],
              "norm: expected the number of one that was registered, got ", norm);
  put_in_place<iree_lnbwd::Output>(name, {DispatchKey::CompositeImplicitAutograd}, norm);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(iree_lnbwd, library) {
  library.def("describe_op(str name, bool is_backward, str data, str[] arguments, str[] results) "
              "-> int",
              describe_op);
  library.def("register_gradients(str name, int op, bool takes_sets) -> ()", register_gradients);
  library.def(
      "register_norm(int number, str name, int op, str gradients, int gradients_op, "
      "str from_output, int from_output_op, bool takes_residual, bool own_forward, "
      "bool takes_sets, bool autocast) -> ()",
      register_norm);
  library.def("register_output(int norm, str name) -> ()", register_output);
  library.def(
      "remember(int op, Tensor?[] tensors, int[] normalized_shape, bool[] mask, float? eps, "
      "float weight_offset, ScalarType? result_dtype, int? rows_per_set, int[] driver, int ones, "
      "int scratch_bytes, int[] scratch, int[] launches, int[] graph, int[] strides=[]) -> ()",
      remember);
  library.def("forget() -> ()", forget);
  library.def("tell_of_fork() -> ()", tell_of_fork);
}
