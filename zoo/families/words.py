"""Word lists shared by the families (ASCII only, kept small on purpose)."""

from __future__ import annotations

FEMALE = tuple(
    ["Anna", "Maria", "Clara", "Emma", "Lena", "Nora", "Ida", "Eva", "Rosa", "Julia", "Sara", "Lisa", "Mia", "Ella", "Olga", "Vera", "Ruth", "Alice", "Helen", "Irene", "Laura", "Tina", "Greta", "Hanna", "Karin", "Petra", "Susan", "Wanda", "Zoe", "Diana"]
)
MALE = tuple(
    ["Tom", "Paul", "Peter", "Mark", "Adam", "Ben", "Carl", "David", "Erik", "Felix", "Georg", "Hugo", "Ivan", "Jonas", "Karl", "Leo", "Max", "Nils", "Oscar", "Robert", "Simon", "Theo", "Victor", "Walter", "Frank", "Henry", "Jack", "Martin", "Oliver", "Samuel"]
)
FIRST = FEMALE + MALE
LAST = tuple(
    ["Berg", "Smith", "Moore", "Brown", "Clark", "Davis", "Evans", "Fischer", "Garcia", "Hansen", "Irving", "Jones", "Keller", "Larsen", "Miller", "Nilsen", "Olsen", "Parker", "Quinn", "Reed", "Stone", "Taylor", "Urban", "Vogel", "Weber", "Young", "Ziegler", "Adams", "Baker", "Cook", "Dahl", "Ellis", "Ford", "Green", "Hall", "Hunt", "Jensen", "King", "Lopez", "Meyer", "Novak", "Owens", "Perez", "Rossi", "Silva", "Turner", "Wagner", "West", "Wood", "White", "Hill", "Lake", "Marsh", "Field", "Winter", "Summer", "Frost", "Cole", "Lind", "Holm"]
)
CITIES = tuple(
    ["Oslo", "Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Prague", "Warsaw", "Dublin", "Lisbon", "Athens", "Zurich", "Geneva", "Milan", "Turin", "Munich", "Hamburg", "Bremen", "Bergen", "Helsinki", "Tallinn", "Riga", "Vilnius", "Boston", "Denver", "Dallas", "Austin", "Chicago", "Seattle", "Miami", "Toronto", "Montreal", "Tokyo", "Osaka", "Kyoto", "Seoul", "Delhi", "Mumbai", "Cairo", "Nairobi", "Lagos", "Lima", "Quito", "Bogota", "Sydney", "Perth", "Porto", "Seville", "Krakow"]
)
MONTHS = tuple(["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"])
DAYS = tuple(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"])
GOODS = tuple(
    ["pens", "books", "apples", "pears", "lamps", "chairs", "cups", "plates", "shirts", "hats", "bags", "boxes", "eggs", "stamps", "cards", "coins", "balls", "keys", "socks", "pots"]
)
PET_KINDS = tuple(["cat", "dog", "rabbit", "parrot", "hamster", "horse", "goat", "turtle"])
PET_NAMES = tuple(
    ["Bella", "Luna", "Rex", "Max", "Coco", "Daisy", "Milo", "Oscar", "Ruby", "Rocky", "Simba", "Toby", "Bruno", "Lucky", "Molly", "Pepper", "Shadow", "Tiger", "Ginger", "Buddy"]
)
ROOMS = tuple(["room A", "room B", "room C", "room 1", "room 2", "room 3", "room 4", "room 5", "room 12", "room 20", "hall A", "hall B", "hall 1", "hall 2"])
MAIL_HOSTS = tuple(["mail.com", "post.org", "web.net", "home.com", "work.org"])
IDENT = tuple(
    ["user", "name", "order", "item", "price", "total", "count", "list", "file", "path", "line", "page", "time", "date", "start", "end", "first", "last", "max", "min", "size", "color", "key", "value", "index", "data", "table", "room", "city", "phone"]
)
