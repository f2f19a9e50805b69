// PyTorch warns of whoever overrides a kernel; we mean to.

#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace iree_lnbwd {

// While it lives, this thread's warnings of overridden kernels are dropped, and no others.
class WithoutOverrideWarning {
 private:
  class Handler : public c10::WarningHandler {
   public:
    void process(const c10::Warning& warning) override {
      if (warning.msg().find("Overriding a previously registered kernel") == std::string::npos) {
        before_->process(warning);
      }
    }

   private:
    c10::WarningHandler* before_ = c10::WarningUtils::get_warning_handler();
  };

  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

}  // namespace iree_lnbwd
