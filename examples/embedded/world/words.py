"""The closed word lists of the embedded model's world: actions with synonyms, nouns, modifiers, names. Data only, no chance.

Synonyms of different actions never overlap: which action a verb names is the one thing that has to be learnt by heart.
"""

from __future__ import annotations

# action -> what names it in tool names (single words) and in requests and descriptions (the same, and phrases).
ACTIONS: dict[str, tuple[str, ...]] = {
    "get": ("get", "fetch", "retrieve", "show", "pull up"),
    "find": ("find", "search", "locate", "look for"),
    "list": ("list", "enumerate", "go through"),
    "create": ("create", "make", "add", "set up"),
    "delete": ("delete", "remove", "erase", "get rid of"),
    "update": ("update", "change", "modify", "edit"),
    "send": ("send", "deliver", "dispatch"),
    "cancel": ("cancel", "revoke", "call off"),
    "book": ("book", "reserve"),
    "convert": ("convert", "transform"),
    "check": ("check", "verify", "inspect"),
    "schedule": ("schedule", "plan"),
    "track": ("track", "follow", "trace"),
    "export": ("export", "download"),
    "import": ("import", "upload", "load"),
    "pay": ("pay", "settle"),
    "refund": ("refund", "reimburse"),
    "open": ("open", "unlock"),
    "close": ("close", "shut", "lock"),
    "start": ("start", "launch", "run"),
    "stop": ("stop", "halt", "end"),
    "approve": ("approve", "accept", "confirm"),
    "reject": ("reject", "refuse", "turn down"),
    "assign": ("assign", "allocate"),
    "rename": ("rename", "relabel"),
    "copy": ("copy", "duplicate", "clone"),
    "move": ("move", "transfer", "relocate"),
    "archive": ("archive", "store", "put away"),
    "restore": ("restore", "recover", "bring back"),
    "share": ("share", "publish"),
    "print": ("print", "typeset"),
    "count": ("count", "tally"),
    "compare": ("compare", "contrast"),
    "rate": ("rate", "score", "grade"),
    "measure": ("measure", "gauge"),
    "buy": ("buy", "purchase"),
    "sell": ("sell", "trade in"),
    "repair": ("repair", "fix", "mend"),
    "clean": ("clean", "wash", "tidy"),
    "merge": ("merge", "combine", "join"),
    "split": ("split", "divide"),
    "block": ("block", "ban"),
    "mute": ("mute", "silence"),
    "summarize": ("summarize", "sum up"),
    "translate": ("translate", "render"),
    "sign": ("sign", "undersign"),
    "rent": ("rent", "lease"),
    "test": ("test", "try out"),
}
READING = frozenset(("get", "find", "list", "check", "track", "count", "compare", "measure", "summarize"))

NOUNS = """
account address agenda airport alarm album alert animal answer apartment app apple appointment arm article artist asset atlas attendee
auction audit author badge bag bakery ball banana bank banner barrel basket battery beach beam bed bell bench bicycle bill bird blanket
blog boat body bolt bone bonus border bottle boundary bowl box branch bread brick bridge brush bucket budget building bus button cabin
cable cake calendar camera camp campaign candle canvas captain car card cargo carpet cart case castle catalog category cave ceiling cell
chain chair channel chapter charge chart chat cheese chef church circle citizen claim class client clinic clock cloud club coach coast
coat coffee coin collar collection college column comment committee company compass concert condition conference contact container
contest contract cook cookie corner cottage counter country coupon course court cousin cover crane credit crew crop crowd crown cup
currency curtain customer cycle dairy dam dance dashboard deadline deal debt deck deer degree dentist deposit desert desk detail device
diagram diamond diary dinner director discount dish district doctor document dog dollar domain donor door drawer dress drink driver
drone drum duck dust duty eagle editor egg election elevator email employee engine entrance envelope episode error essay estate event
exam exhibit expense factory fair family farm fashion fax feast fence ferry festival field file film filter finger fire fish flag flight
floor flower flute folder food forest forecast forum fountain fragment frame friend fruit fuel fund furniture gadget game garage garden
gas gate gift glass globe glove goal goat gold grain grammar grant grape graph group guard guest guide guitar habit hall hammer harbor
hat heater hedge helmet hill hobby holiday honey hook horse hospital host hotel house icon idea image income index ingredient inn insect
instance insurance interview invoice island issue item jacket jar jewel job journal journey judge juice jungle kettle key keyboard
kingdom kit kitchen kite knife label ladder lake lamp language laptop law lawyer layer leaf league lecture leg lemon lens lesson letter
library license lift light limit line lion liquid log lounge luggage lunch machine magazine magnet mail manager map market mask match
meal medal medicine meeting member menu message metal meter milestone milk mine mirror mission model module monitor monument motor
mountain mouse movie museum music mustard nail needle neighbor nest net network newsletter note notebook novel nurse object ocean office
oil onion operator opinion orange orchard orchestra order organ outlet oven owner package page paint painting palace pan panel paper
parcel parent park partner party passenger passport password patch patient pattern payment peak pen pencil pension permit person phone
photo piano picture pie pillow pilot pipe pipeline plane planet plant plate platform player playlist plot pocket poem policy pond pool
portrait post poster pot potato prescription present printer prize problem procedure product profile program project proposal protocol
pump puzzle quarter query queue quiz quote rabbit radio railway rain recipe record region relay reminder report request resident
restaurant review reward ribbon rice ring river road robot rocket roof room root rope route router rug rule salad salary sale salt
sample sand sandwich satellite sauce school scooter screen script sculpture sea season seat section seed sensor server session sheep
shelf shell shift ship shipment shirt shoe shop signal silver singer site sketch skirt snack snow soap sofa soldier song soup spice
spoon spring stadium staff stage stamp star station statue stock stone storm story stove street student studio subscription suit
supplier survey switch symbol table tablet tag tailor tank task tax taxi teacher team temple tenant tent terminal theater ticket tiger
tile timer tool topic tower town toy trail train treaty tree trial tribe trophy truck trunk tunnel tutor umbrella uniform union unit
vacancy valley van vase vault vehicle vendor venue vessel video village villa vine violin visa visitor volcano voucher wagon wallet
warehouse warranty watch water weather website wedding weekend wheel whistle window wing winner wire wolf workshop wrist yard zone
""".split()

MODIFIERS = """
active annual archived backup blue broken cheap closed common cold daily deleted digital double draft early empty expired external fast
final first foreign free frozen full global green hidden internal large late linked local lost main manual mobile monthly native new
nightly old overdue paid partial pending plain private public rare recent red regional remote rented round rural secret shared short
signed simple slow small special spare square steel sunny temporary urban urgent virtual weekly white wooden yearly young
""".split()

ATTRIBUTES = "age area balance capacity color cost depth fee height length level mood owner phase price rank score size speed state".split()
NUMBERS = frozenset("age area balance capacity cost depth fee height length level price rank score size speed".split())

PEOPLE = """
Ada Alan Alice Amir Ana Anders Anita Arjun Astrid Bea Ben Bruno Carla Chen Clara Dana David Diego Dora Elena Elif Emil Emma Erik Eva Fatima
Felix Finn Frida Gabor Greta Hana Hugo Ines Ingrid Ivan Jana Jonas Julia Kai Karim Kenji Klara Lars Leila Lena Leo Lina Luca Maja Marco
Maria Marta Mei Mila Nadia Nils Nina Noah Nora Olga Omar Oscar Otto Paula Petra Priya Rafael Rosa Samir Sara Sofia Sven Tara Theo Tomas
Uma Vera Viktor Wanda Yara Yusuf Zoe
""".split()
PLACES = """
Accra Athens Austin Bergen Berlin Bogota Boston Cairo Calgary Caracas Chennai Chicago Dakar Dallas Damascus Delhi Denver Dublin Durban
Geneva Genoa Glasgow Hamburg Hanoi Havana Helsinki Izmir Jakarta Karachi Kyoto Lagos Leeds Leipzig Lima Lisbon London Lyon Madrid Malaga
Manila Memphis Miami Milan Mumbai Munich Nairobi Naples Nice Oslo Osaka Oxford Paris Perth Porto Prague Quito Riga Rome Seattle Seoul
Sofia Split Tallinn Tampa Tehran Tokyo Toronto Tunis Turin Utrecht Vienna Vilnius Warsaw Zagreb Zurich
""".split()
CHOICES: dict[str, tuple[str, ...]] = {
    "status": ("open", "closed", "pending", "done", "draft", "late"),
    "priority": ("low", "medium", "high", "critical"),
    "format": ("pdf", "csv", "xml", "json", "html", "text"),
    "unit": ("metric", "imperial", "nautical"),
    "color": ("red", "green", "blue", "black", "white", "yellow"),
    "size": ("small", "medium", "large", "huge"),
    "mode": ("fast", "slow", "safe", "silent", "loud"),
    "shape": ("round", "square", "flat", "narrow", "wide"),
}
# Made of these: words that mean nothing, so that copying and comparing is all that can be learnt about them.
ONSETS = "b bl br c d dr f fl g gl gr h j k kl kr l m n p pl pr qu r s sk sl sn sp st t tr v w y z".split()
VOWELS = "a e i o u".split()
CODAS = ["", "", "", "", "n", "r", "l", "s", "m", "x"]
SCRIPTS = ("äöüéèçñåøaeiounrst", "абвгдежзиклмнопрстуфхц", "αβγδεζηθικλμνοπρστυφχω", "東京大学日本中国人山川水火木金土月")
