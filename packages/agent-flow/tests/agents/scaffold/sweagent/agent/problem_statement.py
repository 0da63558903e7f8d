from pydantic import BaseModel


class TextProblemStatement(BaseModel):
    text: str
    id: str
    extra_fields: dict = {}

    def get_problem_statement(self):
        return self.text

    def get_extra_fields(self):
        return self.extra_fields
