"""Models as applications declare them; pydantic writes their schemas and reads what was written."""
from datetime import date, datetime, time
from enum import Enum
from typing import Any, Literal, Optional, Union
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field


class Colour(str, Enum):
    red = "red"
    blue = "blue"


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")
    street: str = Field(max_length=20, min_length=1)
    zip: str = Field(pattern=r"^[0-9]{5}$")
    site: AnyUrl


class Node(BaseModel):
    v: int = Field(ge=0, lt=100)
    kids: list["Node"] = Field(default_factory=list, max_length=2)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    weight: float = Field(gt=0, le=100)


class Person(BaseModel):
    name: str
    age: Optional[int] = None
    colour: Colour
    address: Address
    tags: list[str] = Field(max_length=3)
    pet: Union[Cat, Dog] = Field(discriminator="kind")
    scores: dict[str, float]
    pair: tuple[int, str]
    mode: Literal["a", "b", 3]
    tree: Node
    either: Union[int, str, None]
    extra: Any = None
    flag: bool = True


class Event(BaseModel):
    day: date
    at: datetime
    clock: time
    id: UUID


MODELS = [Address, Node, Cat, Dog, Person, Event]
