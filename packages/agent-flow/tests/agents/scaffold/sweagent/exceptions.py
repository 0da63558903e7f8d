class FormatError(Exception):
    pass


class FunctionCallingFormatError(FormatError):
    def __init__(self, message, error_code, **extra_info):
        super().__init__(f"{message} [error_code={error_code}]")
        self.message = message
        self.extra_info = {"error_code": error_code, **extra_info}


class ContextWindowExceededError(Exception):
    pass


class CostLimitExceededError(Exception):
    pass


class TotalCostLimitExceededError(CostLimitExceededError):
    pass


class InstanceCallLimitExceededError(CostLimitExceededError):
    pass


class ContentPolicyViolationError(Exception):
    pass
