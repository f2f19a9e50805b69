// A norm's output alone, as a function of Python's.
//
// PyTorch's way from Python to an operator that is not its own looks at each argument as all that it
// may be, in code that nothing else in a step runs. So it is never in the processor's caches, and
// takes as long as a norm of few rows. What is plain comes here; all else goes that way: subclasses of
// Tensor, modes, profilers, an integer in place of a float.
//
// Of Python's API this is the stable part, so that one library serves all versions of Python. Without
// Python's headers, all calls go PyTorch's way.

#if __has_include(<Python.h>)
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED  // there is no stable part without it
#define IREE_LNBWD_FUNCTIONS
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#endif
#endif

#include <ATen/PythonTorchFunctionTLS.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <exception>

#include "torch_autograd.h"

namespace {

#ifdef IREE_LNBWD_FUNCTIONS

using iree_lnbwd::Norm;
using iree_lnbwd::Stack;
using iree_lnbwd::Tensor;
using iree_lnbwd::norms;

// Of PyTorch's library for Python, whose headers need more than the stable part.
struct Exported {
  PyObject* (*wrap)(const at::TensorBase&) = nullptr;
  void (*translate)(const std::exception_ptr&) = nullptr;

  Exported() {
    void* const library = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return;
    find(library, "_Z16THPVariable_WrapRKN2at10TensorBaseE", &wrap);
    find(library, "_ZN5torch29translate_exception_to_pythonERKNSt15__exception_ptr13exception_ptrE",
         &translate);
  }
  explicit operator bool() const { return wrap && translate; }

 private:
  template <class Found>
  static void find(void* library, const char* name, Found* found) {
    *found = reinterpret_cast<Found>(dlsym(library, name));
  }
};

const Exported& exported() {
  static const Exported found;
  return found;
}

struct Function {
  const int64_t number;
  const Norm& norm;
  PyObject *tensor, *parameter;  // the classes of plain tensors
  PyObject* operation;           // PyTorch's way; None: there is no output of what is not plain
  PyObject* address;             // the attribute that has a tensor's
};

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

bool push_tensor(const Function& function, PyObject* given, Stack* stack) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(given));
  if (type != function.tensor && type != function.parameter) return false;
  PyObject* const address = PyObject_GetAttr(given, function.address);
  auto* const found = address ? static_cast<at::TensorImpl*>(PyLong_AsVoidPtr(address)) : nullptr;
  Py_XDECREF(address);
  if (!found) {
    PyErr_Clear();
    return false;
  }
  stack->emplace_back(Tensor(c10::intrusive_ptr<at::TensorImpl>::reclaim_copy(found)));
  return true;
}

bool push_float(PyObject* given, Stack* stack) {
  if (!PyFloat_CheckExact(given)) return false;
  stack->emplace_back(PyFloat_AsDouble(given));
  return true;
}

bool push_columns(PyObject* given, Stack* stack) {
  if (!PyLong_CheckExact(given)) return false;
  int is_too_large = 0;
  const int64_t columns = PyLong_AsLongLongAndOverflow(given, &is_too_large);
  if (is_too_large) return false;
  stack->emplace_back(c10::List<int64_t>({columns}));
  return true;
}

// Puts the arguments of the operator on the stack, if all are plain.
bool push(const Function& function, PyObject* const* given, size_t count, Stack* stack) {
  const Norm& norm = function.norm;
  if (count != norm.taken + (norm.own_forward ? 5 : 2)) return false;
  if (at::impl::torch_function_mode_enabled()) return false;
  stack->reserve(count);
  for (size_t i = 0; i < norm.taken; ++i, ++given) {
    if (*given == Py_None && i != norm.op.data) {
      stack->emplace_back();
    } else if (!push_tensor(function, *given, stack)) {
      return false;
    }
  }
  if (!push_columns(*given++, stack)) return false;
  if (*given == Py_None && norm.mean < 0) {  // RMS norms have an eps of their own
    stack->emplace_back();
  } else if (!push_float(*given, stack)) {
    return false;
  }
  ++given;
  if (!norm.own_forward) return true;
  if (!push_float(*given++, stack)) return false;  // weight_offset
  if (*given != Py_True && *given != Py_False) return false;
  stack->emplace_back(*given++ == Py_True);  // memory_efficient
  stack->emplace_back();                     // output_dtype
  return *given == Py_None;
}

// Whether parameters are vectors of the input's type.
bool are_alike(const Norm& norm, const Stack& stack) {
  const Tensor& data = stack[norm.op.data].toTensor();
  if (!iree_lnbwd::has_module(data.scalar_type())) return false;
  for (size_t i = 0; i < norm.taken; ++i) {
    const Tensor* vector = iree_lnbwd::pointer_to(stack[i]);
    if (!vector || i == norm.op.data) continue;
    if (vector->dim() != 1 || vector->scalar_type() != data.scalar_type()) return false;
  }
  return true;
}

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const auto& function = *static_cast<const Function*>(PyCapsule_GetPointer(self, nullptr));
  const bool is_strict = function.operation == Py_None;
  try {
    Stack stack;
    if (push(function, given, count, &stack) &&
        (!is_strict || are_alike(function.norm, stack))) {
      bool is_done = false;
      {
        const WithoutGil without;
        is_done = iree_lnbwd::output_alone(function.number, &stack);
      }
      if (is_done) return exported().wrap(stack.back().toTensor());
    }
  } catch (...) {
    exported().translate(std::current_exception());
    return nullptr;
  }
  if (is_strict) {
    Py_INCREF(Py_None);
    return Py_None;
  }
  PyObject* const all = PyTuple_New(count);
  if (!all) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(given[i]);
    PyTuple_SetItem(all, i, given[i]);
  }
  PyObject* const found = PyObject_Call(function.operation, all, nullptr);
  Py_DECREF(all);
  return found;
}

// A new function, which is there for as long as the process.
PyObject* function_of(int64_t number, PyObject* tensor, PyObject* parameter, PyObject* operation) {
  static PyMethodDef method = {"output_alone",
                               reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)),
                               METH_FASTCALL, nullptr};
  PyObject* const address = PyUnicode_InternFromString("_cdata");
  if (!address) return nullptr;
  for (PyObject* kept : {tensor, parameter, operation}) Py_INCREF(kept);
  PyObject* const self = PyCapsule_New(
      new Function{number, *norms()[number], tensor, parameter, operation, address}, nullptr,
      nullptr);
  return self ? PyCFunction_NewEx(&method, self, nullptr) : nullptr;
}

// Where Python finds `function_of`; 0 where there are no functions.
int64_t maker() { return exported() ? reinterpret_cast<int64_t>(function_of) : 0; }

#else

int64_t maker() { return 0; }

#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(iree_lnbwd, library) { library.def("maker_of_functions() -> int", maker); }
