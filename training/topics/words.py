"""Lists of names and things, and made-up names, so that copying is learnt and not single words."""

from __future__ import annotations

from random import Random

NAMES = """Anna Tom Maria Peter Lisa John Emma Paul Laura Max Sara David Nina Felix Julia Leo Mia Ben Clara Noah Eva Oscar Ida Hugo Olga Ivan
Lena Karl Rosa Emil Zoe Adam Ella Jack Lucy Mark Alice Bob Carol Dan Erin Frank Grace Henry Iris James Kate Liam Molly Nick Olivia Pia Quinn
Robert Sam Tina Uma Victor Wendy Xavier Yara Zack Amir Bella Chen Diego Elif Fatima George Hana Igor Jonas Kim Luca Marco Nora Omar Priya Ravi
Sofia Tariq Ursula Vera Walter Yuki Ahmed Björn Chloe Daniel Elena Finn Greta Hassan Isabel Jan Katya Linus Martin Nadia Otto Petra Rita Simon
Theo Ulrich Valentin Wanda Alex Chris Sandra Michael Susan Steve Mary Jane Joe Bill Amy Kevin Brian Laila Mohammed Ali Mei Ling""".split()
COLOURS = "red green blue yellow purple orange pink black white brown grey turquoise violet gold silver".split()
ANIMALS = "cat dog horse bird fish rabbit snake mouse turtle hamster parrot goat cow duck frog spider pig sheep".split()
FOODS = """pizza pasta rice soup bread salad cheese chocolate curry sushi cake apples bananas potatoes noodles pancakes tacos
dumplings""".split() + ["ice cream", "fish and chips"]
CITIES = """London Paris Berlin Rome Madrid Oslo Vienna Prague Dublin Lisbon Athens Warsaw Moscow Tokyo Beijing Delhi Cairo Lagos Nairobi Sydney
Toronto Boston Chicago Seattle Denver Austin Miami Lima Quito Bogota Havana Munich Hamburg Cologne Zurich Geneva Milan Turin Naples Venice Lyon Nice
Bordeaux Brussels Amsterdam Rotterdam Copenhagen Stockholm Helsinki Tallinn Riga Vilnius Budapest Belgrade Sofia Istanbul Ankara Tehran Dubai Mumbai
Bangkok Hanoi Manila Seoul Osaka Kyoto Shanghai Singapore Jakarta Perth Melbourne Auckland Santiago Montreal Vancouver Dallas Houston Phoenix
Detroit Atlanta Reykjavik Bern Basel Graz Salzburg Leipzig Dresden Bremen Krakow Porto Seville Valencia Barcelona Glasgow Edinburgh Leeds York
Bristol Oxford Cambridge Cardiff Belfast""".split() + ["New York", "Los Angeles", "San Francisco", "Hong Kong", "Buenos Aires", "Cape Town", "Mexico City",
                                                      "Tel Aviv", "St Gallen", "Rio de Janeiro"]
JOBS = "teacher doctor nurse farmer driver cook student painter writer lawyer baker pilot programmer engineer gardener musician plumber".split()
COUNTRIES = """France Germany Spain Italy Norway Sweden Poland Japan China India Brazil Canada Mexico Egypt Kenya Nigeria Australia Austria Greece
Turkey Russia Portugal Ireland Iceland Chile Peru Cuba Vietnam Thailand Korea Finland Denmark Belgium Hungary England America""".split()
WORKS = ["hamlet", "faust", "the mona lisa", "war and peace", "the odyssey", "star wars", "moby dick", "the bible", "harry potter", "the magic flute",
         "don quixote", "titanic", "the matrix", "1984", "the hobbit", "guernica", "macbeth", "the lord of the rings"]
PEOPLE = ["einstein", "mozart", "napoleon", "shakespeare", "cleopatra", "newton", "marie curie", "picasso", "gandhi", "obama", "beethoven", "darwin",
          "julius caesar", "ada lovelace", "alan turing", "goethe", "messi", "madonna", "elvis", "plato", "galileo", "bach", "taylor swift"]
THINGS = ["a car", "the moon", "electricity", "gravity", "a computer", "the sun", "water", "democracy", "photosynthesis", "a rocket", "the brain",
          "a volcano", "love", "money", "inflation", "quantum physics", "a black hole", "dna", "the heart", "a phone", "a fridge", "the bicycle",
          "music", "glass", "paper", "blockchain", "the internet", "evolution", "a battery", "a vaccine", "an engine", "chess", "football", "wine",
          "philosophy", "time travel", "a laser", "the stock market", "a virus", "a dinosaur", "the roman empire", "tea", "coffee", "plastic"]
DISHES = ["pizza", "lasagne", "sushi", "a cake", "bread", "soup", "curry", "pancakes", "beer", "an omelette", "risotto", "tiramisu", "chili", "stew"]
TASKS = ["sort a list", "book a flight", "send an email", "draw a picture", "play a song", "open a file", "find prime numbers", "order food",
         "write my homework", "read a csv file", "make a website", "reverse a string", "hack a computer", "call my mother", "scrape a web page",
         "buy shoes", "set an alarm", "parse json"]
EVENTS = ["world cup", "second world war", "last election", "olympic games", "french revolution", "super bowl", "moon landing", "champions league",
          "oscars", "cold war"]
SOFTWARE = """linux windows firefox chrome docker git java rust gpt-4 llama mistral qwen deepseek excel photoshop minecraft ubuntu kubernetes react
mysql postgres bitcoin youtube wikipedia android bert phi-3 gemma nginx redis vim javascript numpy pandas opencv blender""".split()
NOTES = ["shopping", "birthday", "meeting", "holiday", "recipe", "garden", "passwords", "project plan", "dentist", "books to read", "ideas",
         "train times", "insurance", "school", "budget", "phone numbers", "gifts", "wifi", "car repair", "tax", "kernel speed", "cache design"]
PLAIN = """time year people way day man thing woman life child world school state family student group country problem hand part place case week company
system program question work government number night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car city community name president team minute idea
body information back parent face others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education apple river stone cloud bridge window garden candle forest mirror pocket rocket silver tiger train violin winter yellow
banana basket blanket bottle button camera carpet castle cherry corner cotton dragon engine feather finger flower guitar hammer island jacket kitten
ladder lemon letter magnet market marble meadow monkey mountain needle ocean orange paper pencil pepper pillow planet puzzle rabbit ribbon sailor
saddle shadow spoon summer sunset thunder ticket tunnel turtle valley village walnut whale wizard zebra""".split()
_ONSETS = "b c d f g h j k l m n p r s t v w z br dr fr gr kr pl st tr sh ch th".split()
_VOWELS = "a e i o u a e i o ai ei ou ia".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "t", "nd", "rt"]


def made_up(rng: Random, syllables: int | None = None) -> str:
    """A name nobody has, of one to three syllables."""
    count = syllables or rng.choice([1, 2, 2, 2, 3])
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def person_name(rng: Random) -> str:
    """A first name: a common one or a made-up one."""
    return made_up(rng).capitalize() if rng.random() < 0.35 else rng.choice(NAMES)


def city_name(rng: Random) -> str:
    """A city: a real one or a made-up one."""
    return made_up(rng).capitalize() if rng.random() < 0.3 else rng.choice(CITIES)
