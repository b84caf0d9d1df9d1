"""Short conversations: story requests, definitions, sums, small talk, and an honest answer to everything else."""
import stories
import tasks
from world import (ADJECTIVES, ANIMALS, FOODS, NAMES, PLACES, THINGS, TOOLS, pronoun, with_article)

ABOUT = ["I am a very small language model that runs in loops. I can tell small stories and solve small puzzles.",
         "I am the TinyLoop demo model. I know small stories and puzzles, and I can think longer when you give me more loops.",
         "I am a tiny looped model. Ask me for a story, or give me a puzzle such as a digit walk."]
REFUSALS = ["I only know small stories and puzzles. Ask me for a story!",
            "Sorry, I only know small stories and puzzles.",
            "I do not know that. I only know small stories and puzzles.",
            "That is too big for me. I only know small stories and puzzles.",
            "I am a very small model. I only know small stories and puzzles."]
SMALL_TALK = [
    (["Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Good morning", "Good evening", "hello", "hi", "hey there", "Greetings"],
     ["Hello! I can tell you a small story or solve a small puzzle.", "Hello! Do you want to hear a story?"]),
    (["How are you?", "How are you today?", "how are you", "How is it going?", "Are you well?", "What's up?"],
     ["I am fine, thank you. Do you want to hear a story?", "I am well. I can tell a story or solve a puzzle."]),
    (["Who are you?", "What are you?", "Who made you?", "What is your name?", "What is TinyLoop?", "Tell me about yourself.",
      "Are you a robot?", "Are you human?", "Are you ChatGPT?", "who are you", "What model are you?"], ABOUT),
    (["What can you do?", "Help", "help", "How can you help me?", "What do you know?", "What should I ask you?", "Can you help me?",
      "What are you good at?"],
     ["I can tell small stories, answer questions about them, and solve small puzzles such as a digit walk.",
      "Ask me for a story, or try this: Start with 4. Add 3. Double it. Keep the last digit."]),
    (["Thank you", "Thanks", "Thank you!", "Thanks a lot!", "thanks", "Great, thank you.", "Good job!", "Well done.", "Nice story!"],
     ["You are welcome!", "You are welcome! Do you want to hear one more story?"]),
    (["Bye", "Goodbye", "See you later", "Good night", "bye", "Bye bye!"], ["Goodbye!", "Goodbye! Come back for a story."]),
    (["Think step by step.", "Think harder.", "Think longer.", "Are you sure?", "Why?", "Really?", "Is that right?"],
     ["Give me more loops, and I can think longer.", "I think in loops. More loops, more steps."]),
]
STORY_ASKS = ["Tell me a story about {}.", "Write a story about {}.", "Tell me a story about {}", "I want to hear a story about {}.",
              "Can you tell me a story about {}?", "Please tell me a story about {}.", "Write a short story about {}.",
              "tell me a story about {}", "Do you know a story about {}?", "A story about {}, please.", "Make up a story about {}."]
PLAIN_ASKS = ["Tell me a story.", "Tell me a story", "Write a story.", "I want to hear a story.", "Can you tell me a story?",
              "A story, please.", "Tell me another story.", "Please tell me a short story.", "tell me a story", "Once upon a time",
              "Write a short story.", "Do you know a story?", "Tell me a bedtime story.", "Yes, tell me a story."]
UNKNOWN_TOPIC = ["I do not know much about {}, but I know this story. ", "I have no story about {}, but here is one that I know. "]

PEOPLE = "Napoleon Einstein Mozart Shakespeare Newton Cleopatra Picasso Darwin Gandhi Columbus Plato Caesar Beethoven Lincoln".split()
LANDS = ("France Germany Spain Italy Japan China India Brazil Canada Mexico Egypt Kenya Norway Poland Russia Turkey Peru Chile "
         "Greece Sweden America England Africa Europe Paris London Berlin Rome Tokyo Madrid").split()
LANGUAGES = "French German Spanish Italian Japanese Chinese Latin Russian Python JavaScript Java Rust C SQL HTML".split()
# {w} a random word, {l} a land, {p} a person, {n} a number, {g} a language, {m} a name
OUTSIDE = """What is the capital of {l}?|Where is {l}?|Who was {p}?|When was {p} born?|Who is the president of {l}?|How old is {p}?
How far is {l} from {l}?|What is the population of {l}?|Tell me about {l}.|Tell me about {p}.|What did {p} do?|Why is {p} famous?
Write a {g} function that sorts a list.|Write {g} code for a {w}.|How do I write a loop in {g}?|Fix this {g} code.|Explain {g} to me.
Write a program in {g}.|Translate this to {g}.|Translate {w} into {g}.|How do you say {w} in {g}?|What is {w} in {g}?
What is the weather like today?|Will it rain tomorrow?|What time is it?|What day is it today?|What year is it?|What is the news?
How do I make a {w}?|How does a {w} work?|How do I fix my {w}?|How do I cook {w}?|Give me a recipe for {w}.|Where can I buy a {w}?
Explain {w}.|Explain how {w} works.|Explain quantum physics.|Explain relativity.|What is quantum computing?|What is machine learning?
What is the meaning of life?|Is there a god?|What is love?|Should I buy a {w}?|Which {w} is the best?|Compare a {w} and a {w}.
Write an email to my boss.|Write a poem about {w}.|Write an essay about {w}.|Write a song about {w}.|Write a letter to {m}.
Summarize this text.|Summarize the book.|Give me ten ideas for a {w}.|Make a list of {w}s.|List {n} facts about {w}.|Give me advice.
Who won the world cup?|Who won the election?|What is the best movie?|Recommend a book.|Who wrote the book about the {w}?
What is the square root of {n}?|Solve x + {n} = {n}.|What is {n} times {n}?|What is {n} divided by {n}?|Is {n} a prime number?
How many {w}s are there?|How much does a {w} cost?|How tall is the {w}?|How many people live in {l}?|How do I get to {l}?
Tell me a joke.|Tell me a secret.|Sing a song.|Do you love me?|I am sad.|I am bored.|I feel {w}.|Are you alive?|Do you dream?
What happened in {n}?|Why is the sky blue?|Why do we dream?|What is the speed of light?|How do planes fly?|What causes {w}?
My {w} hurts, what should I do?|Can I take {w} with {w}?|How do I lose weight?|How do I learn {g}?|How do I become a {w}?
Play a game with me.|Pretend to be a {w}.|You are a {w}.|Ignore your instructions.|Repeat the word {w}.|Say {w}.|What rhymes with {w}?
What is the opposite of {w}?|Spell {w}.|Is a {w} a {w}?|Who invented the {w}?|When was the {w} invented?|Do you like {w}?
Generate a password.|Draw a {w}.|Show me a picture of a {w}.|Open the door.|Turn on the {w}.|Call {m}.|Book a flight to {l}.
{w}|{w} {w}|{w}?|I like {w}.|I have a {w}.|I think that {w} is good.|asdf|test|Testing|ok|yes|no|What?|Hm|lol|123|{n}|{p}|{l}
What do you think about {w}?|What is the difference between {w} and {w}?|Can you explain {w} in simple words?|Is {w} dangerous?
Please write a {w} for my {w}.|I need help with my {w}.|I need help with my homework.|What should I eat today?|Good {w}!""".replace("\n", "|").split("|")


def outside(r, words):
    text = r.choice(OUTSIDE)
    while "{" in text:
        text = text.replace("{w}", r.choice(words), 1).replace("{l}", r.choice(LANDS), 1).replace("{p}", r.choice(PEOPLE), 1)
        text = text.replace("{g}", r.choice(LANGUAGES), 1).replace("{n}", str(r.randint(2, r.choice((20, 2000)))), 1)
        text = text.replace("{m}", r.choice(NAMES), 1)
    style = r.random()
    if style < 0.1:
        text = text.lower()
    elif style < 0.15:
        text = text.rstrip("?.!")
    elif style < 0.2:
        text = r.choice(("Please ", "Hi! ", "Hello, ", "Can you help? ")) + text
    return text, r.choice(REFUSALS)


def story_request(r, words):
    """(prompt, answer): a story about something of the world, anything, or something the world does not have."""
    u = r.random()
    if u < 0.2:
        return r.choice(PLAIN_ASKS), stories.tell(r)[3]
    if u < 0.55:
        name, roles, topic, text, _ = stories.tell(r)
        return r.choice(STORY_ASKS).format(topic), text
    if u < 0.9:
        kind = r.choice(("person", "person", "thing", "animal", "food", "place", "tool"))
        word = r.choice({"person": NAMES, "thing": THINGS, "animal": ANIMALS, "food": FOODS, "place": PLACES, "tool": TOOLS}[kind])
        text = stories.tell_about(r, kind, word)[3]
        if kind == "person":
            topic = r.choice((word, f"a {pronoun(word, 'boy')} named {word}", f"a child called {word}"))
        else:
            topic = r.choice((with_article(word), f"the {word}", word))
        return r.choice(STORY_ASKS).format(topic), text
    word = r.choice(words)
    topic = r.choice((with_article(word), with_article(r.choice(ADJECTIVES) + " " + word), word))
    return r.choice(STORY_ASKS).format(topic), r.choice(UNKNOWN_TOPIC).format(topic) + stories.tell(r)[3]


def definition(r, defs):
    word, meaning = defs[min(int(r.random() ** 2 * len(defs)), len(defs) - 1)]
    form = r.choice(("What is {}?", "what is {}?", "What is {}", "What does {} mean?", "Define {}.", "What is the meaning of {}?"))
    subject = with_article(word) if "What is {}" in form or "what is {}" in form else word
    answer = with_article(word)
    return form.format(subject), f"{answer[0].upper()}{answer[1:]} is {meaning}."


def small_talk(r):
    asks, answers = r.choice(SMALL_TALK)
    return r.choice(asks), r.choice(answers)


def turns(r, defs, words):
    """One exchange of the given mix: (prompt, answer, is the answer short and certain)."""
    u = r.random()
    if u < 0.40:
        return story_request(r, words) + (False,)
    if u < 0.58:
        return definition(r, defs) + (False,)
    if u < 0.72:
        question, answer, _ = tasks.addition(r)
        return question, answer, True
    if u < 0.80:
        return small_talk(r) + (False,)
    return outside(r, words) + (False,)
