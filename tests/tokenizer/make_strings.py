"""Random and nasty strings for comparing tokenizers."""
import unicodedata

WORDS = ("the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word but "
         "not what all were we when your can said there use an each which she do how their if will up other about out many "
         "Schleife Größe façade naïve coöperate Ångström résumé don't we'll I'm you've he'd it's DON'T I'LL 'tis o'clock "
         "tokenizer looping state HTTPServer camelCaseWord snake_case_name SCREAMING_CASE x86_64 utf-8 C++ f(x) a->b i++ "
         "Привет мир Ελλάδα γειά שלום עולם مرحبا بالعالم नमस्ते हिन्दी ไทย 你好世界 日本語のテキスト 한국어 텍스트 ქართული").split()

NASTY = [
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\n \n", "a\n", " a", "a ", "  a", "a  ", "\u00a0", "\u3000",
    "\u200b", "\u200d", "\ufeff", "\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x00", "a\x00b", "\x01\x02\x7f",
    "e\u0301", "\u00e9", "a\u0323\u0307", "a\u0307\u0323", "\u1100\u1161\u11a8", "\u212b", "\u2126", "\ufb01", "\u0344",
    "\u01d5", "\u1e9b\u0323", "q\u0307\u0323\u0307", "\u0915\u093c", "\u0958", "\u0f43", "\uac00", "\U0001d15e",
    "👍", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "1️⃣", "½", "²", "Ⅷ", "٣٤", "१२३", "①", "㊙", "１２３", "０.５", "ⅻ",
    "<s>", "</s>", "<unk>", "<|endoftext|>", "<|endoftext", "<|endoftext|>>", " <|endoftext|> ", "<|endoftext|><|endoftext|>",
    "<|im_start|>user\nhi<|im_end|>\n", "<|begin_of_text|>", "<<|im_start|>", "<|im_start|", "[MASK]", " [MASK] ", "x[MASK]y",
    "[WORD]", "a[WORD]b", " [WORD] ", "_[WORD]", "é[WORD]", "[WORD]1", "[LEFT]", "  [LEFT]  ", "[RIGHT]", "\t[RIGHT]\t x",
    "[BOTH]  [BOTH]", " \n[BOTH]\n ", "[RIGHT] [LEFT]", "[NORMΏ]", "[NORMΩ\u0301]", "<0x0A>", "<0xFF>", "<0x", "▁", "▁▁a",
    " ▁ ", "a▁b", "hello▁ world", "Ġhello", "Ċ", "'s", "'S", "'ſ", "'LL", "''s", "'re're", "I'VE", "\u2019s", "\u212a",
    "0", "00", "000", "0000", "12345", "1234567", "1,234.56", "-1e-10", "0x1F", "3.14159", "a1b2c3", "1st", "v2.0.1",
    "...", "......", "!?", "$$$", "==", "===", "!==", "//", "/* c */", "# h", "{}", "[]", "()", "<>", "\\n", "\\", "`", "~~~",
    "https://example.org/a?b=c&d=%20e#f", "user@example.org", "C:\\dir\\file.txt", "$\\frac{1}{2}$", "\\begin{x}",
    "for (int i = 0; i < n; i++) {\n\tx[i] += y[i] * 2;\n}\n", "def f(a, *b, **c):\n    return a if b else c\n",
    "x" * 200, " " * 200, "\n" * 100, "." * 200, "ab" * 100, "a " * 100, "9" * 100, "é" * 100, "\u0301" * 50, "👍" * 50,
    "\u180e", " \u180e ", "a\u180eb", "\u2002\u2003", "a\u200cb", "\u0345", "\u093e", "\u24b6", "𝐀𝐁", "𝟘𝟙",
]

POOLS = [
    (" ", 6), ("\n", 2), ("\t\r\v\f", 1), ("abcdefghijklmnopqrstuvwxyz", 12), ("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 4),
    ("0123456789", 5), (".,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+`~", 6), ("äöüßéèñçøåæœžł", 2), ("абвгдежзийклмн", 2),
    ("αβγδεζηθικλμ", 1), ("אבגדהוזח", 1), ("ابتثجحخد\u064b\u064c\u064d\u064e", 2), ("अआइईउऊ\u093e\u093f\u0940\u094d", 1),
    ("กขฃคฅ\u0e31\u0e34\u0e35", 1), ("你好世界中文字符漢字", 2), ("あいうえおアイウエオー", 1), ("가나다라마바\u1100\u1161\u11a8", 1),
    ("\u0300\u0301\u0302\u0308\u0323\u0327\u0328\u0338\u0345\u20d0", 2), ("👍😀🎉🏽\u200d\ufe0f❤🇩🇪", 2),
    ("\u00a0\u1680\u2000\u2009\u2028\u202f\u205f\u3000\u180e\u200b\u2060\ufeff", 1), ("\x00\x01\x02\x1b\x7f\x80\x9f\xad", 1),
    ("½¼²³¹①⑳Ⅷⅻ٠١٢३४５６〇一", 1), ("▁ĠĊĉ", 1), ("𝐀𝑏𝟘𐍈𒀀", 1),
]
PIECES = ["'s", "'t", "'re", "'ll", "'D", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[MASK]", "[WORD]",
          "[LEFT]", "[RIGHT]", "[BOTH]", "[NORMΏ]", "<0x0A>", "  ", "    ", "\n\n", "\r\n", "://", "->", "==", "000"]


# Combining marks that the library's older Unicode table does not order (README.md): left out of random strings.
UNORDERED = [(0x7FD, 0x7FD), (0x898, 0x8D3), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEBA, 0xEBA), (0x1715, 0x1715),
             (0x1ABF, 0x1ACE), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x10D24, 0x10EFF), (0x10F46, 0x10F85), (0x11070, 0x11070),
             (0x1133B, 0x1133B), (0x1145E, 0x1145E), (0x11839, 0x11F42), (0x16FF0, 0x16FF1), (0x1E08F, 0x1E4EF)]


def assigned(rng):
    """A random character, of any plane, about which both libraries agree."""
    while True:
        cp = rng.choice([rng.randrange(0x20, 0x250), rng.randrange(0x20, 0x3000), rng.randrange(0x3000, 0xD800),
                         rng.randrange(0xE000, 0x10000), rng.randrange(0x10000, 0x20000)])
        # unicodedata is of Unicode 14 or later; newer characters are unassigned for one of the two.
        if unicodedata.category(chr(cp)) != "Cn" and not any(lo <= cp <= hi for lo, hi in UNORDERED):
            return chr(cp)


def from_pools(rng, n):
    pools = rng.sample(POOLS, rng.randrange(1, 6))
    chars = rng.choices([p for p, _ in pools], [w for _, w in pools], k=n)
    return "".join(rng.choice(p) for p in chars)


def one(rng):
    kind = rng.randrange(8)
    if kind == 0:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 30)))
    if kind == 1:
        return "".join(rng.choice(WORDS) + rng.choice(["", " ", "  ", "\n", ", ", ". ", "-", "1"])
                       for _ in range(rng.randrange(1, 20)))
    if kind == 2:
        return from_pools(rng, rng.randrange(1, 60))
    if kind == 3:
        return "".join(assigned(rng) for _ in range(rng.randrange(1, 30)))
    if kind == 4:
        return "".join(rng.choice(NASTY[:-20]) for _ in range(rng.randrange(2, 6)))
    if kind == 5:
        return "".join(rng.choice([from_pools(rng, rng.randrange(1, 6)), rng.choice(PIECES), rng.choice(WORDS)])
                       for _ in range(rng.randrange(2, 15)))
    if kind == 6:  # runs
        return "".join(rng.choice(" \n\ta1.éώ你'") * rng.randrange(1, 12) for _ in range(rng.randrange(1, 12)))
    return from_pools(rng, rng.randrange(60, 400))


def make(rng, n):
    return NASTY + [one(rng) for _ in range(max(0, n - len(NASTY)))]


def every_character():
    """Every character of planes 0 and 1 between a letter and a digit, in strings of 512."""
    chars = [chr(c) for c in range(0x20000) if not 0xD800 <= c < 0xE000]
    return ["".join(f"a{c}1 " for c in chars[i:i + 512]) for i in range(0, len(chars), 512)]
