"""The 1,500 names of the recall task; each is one token of the built-in model.

The most likely names come first, because only the first names also have a capitalised form in the
vocabulary: as many as fit.
"""

_NUM_CAPITALISED = 252

_WORDS = """
heron otter badger falcon raven eagle owl fox wolf bear tiger lion panda koala zebra giraffe
camel horse donkey goat sheep cow pig dog cat mouse rat rabbit hare squirrel beaver hedgehog
mole bat deer moose elk bison buffalo monkey gorilla lemur sloth penguin parrot pigeon sparrow
robin swan goose duck turkey chicken crane stork pelican gull puffin hawk vulture kestrel magpie
finch lark wren swallow crow dove peacock ostrich salmon trout shark whale dolphin seal walrus
octopus squid crab lobster shrimp turtle tortoise frog toad newt lizard gecko snake cobra viper
python iguana spider beetle ant bee wasp hornet moth butterfly dragonfly cricket mantis snail
slug worm alice bob carol dave eve frank grace heidi ivan judy mallory oscar peggy victor walter
anna ben clara david emma felix george hannah isaac julia kevin laura martin nina oliver paula
quentin rachel samuel tina ursula vera william xavier yvonne zoe adam bella charles diana edward
fiona henry irene jack karen leo maria noah olga peter rosa simon thomas paris london berlin
madrid rome vienna prague oslo lisbon dublin athens warsaw moscow tokyo delhi cairo lima quito
bogota boston chicago denver seattle dallas houston miami toronto sydney kyoto osaka seoul
beijing shanghai geneva zurich munich hamburg milan naples venice florence apple banana cherry
grape lemon lime mango melon orange peach pear plum berry apricot avocado red blue green yellow
purple black white pink brown grey mercury venus earth mars jupiter saturn uranus neptune pluto
moon alpha beta gamma delta epsilon zeta theta iota kappa lambda omega sigma coconut fig guava
kiwi papaya pineapple pomegranate quince raspberry strawberry blueberry blackberry cranberry
gooseberry currant raisin date olive tomato potato carrot onion garlic ginger pepper cabbage
lettuce spinach broccoli cauliflower celery cucumber pumpkin squash zucchini eggplant radish
turnip beet parsnip leek shallot artichoke asparagus bean pea lentil chickpea corn rice wheat
barley oat rye millet quinoa almond walnut hazelnut chestnut pecan cashew pistachio peanut acorn
oak maple birch pine spruce cedar cypress willow poplar elm ash beech aspen alder hemlock larch
sequoia redwood juniper yew holly ivy fern moss lichen clover daisy tulip lily rose violet
orchid iris lotus jasmine lavender marigold sunflower poppy peony dahlia daffodil crocus
hyacinth primrose buttercup dandelion thistle nettle heather bramble hawthorn hibiscus magnolia
azalea begonia camellia gardenia geranium petunia zinnia verbena wisteria bamboo cactus palm
reed rush sage thyme basil parsley cilantro dill fennel mint oregano rosemary tarragon chive
saffron turmeric cumin cinnamon nutmeg clove cardamom vanilla anise paprika gold silver copper
iron steel bronze brass tin zinc nickel cobalt chrome titanium platinum aluminum tungsten
uranium helium neon argon krypton xenon oxygen nitrogen hydrogen carbon silicon sulfur sodium
calcium iodine diamond ruby emerald sapphire topaz opal pearl amber jade garnet amethyst quartz
onyx agate turquoise malachite granite marble basalt limestone sandstone slate chalk flint
obsidian pumice gypsum mica feldspar hammer wrench pliers screwdriver chisel saw drill lathe
anvil axe hatchet shovel spade rake hoe sickle scythe trowel crowbar ladder bucket barrel basket
crate box chest trunk drawer cabinet shelf table chair bench stool sofa couch bed pillow blanket
mattress curtain carpet rug lamp lantern candle torch mirror clock watch bell whistle drum flute
violin viola cello harp guitar banjo mandolin lute piano organ trumpet trombone tuba horn
clarinet oboe bassoon saxophone accordion harmonica cymbal gong tambourine xylophone anchor
rudder sail mast keel oar paddle canoe kayak raft ferry yacht schooner frigate galleon submarine
tanker tugboat barge gondola airplane glider helicopter rocket satellite balloon zeppelin
parachute bicycle tricycle scooter motorcycle tractor truck van wagon carriage chariot sled tram
subway trolley bus taxi limousine castle palace tower fortress temple chapel cathedral abbey
monastery pagoda mosque pyramid obelisk lighthouse windmill cottage cabin mansion villa barn
stable shed garage cellar attic balcony terrace porch veranda gate fence bridge tunnel dam canal
harbor pier wharf dock mountain valley canyon cliff cave crater volcano glacier plateau prairie
meadow marsh swamp bog lagoon reef island peninsula desert dune oasis geyser waterfall creek
brook stream pond lake ocean beach bay fjord storm thunder lightning snow hail frost fog mist
breeze gale tornado hurricane blizzard rainbow comet meteor asteroid nebula galaxy quasar pulsar
eclipse aurora equinox solstice zenith horizon baker butcher farmer fisher hunter miller mason
carpenter plumber tailor weaver potter smith cobbler barber doctor nurse surgeon dentist lawyer
judge sheriff soldier sailor pilot captain admiral general colonel major sergeant corporal
knight squire baron duke earl count prince princess king queen emperor sultan pharaoh bishop
monk priest wizard witch sorcerer druid oracle prophet pirate ninja samurai viking gladiator
cowboy ranger scout spy detective zeus hera apollo athena hermes ares hades poseidon artemis
demeter dionysus hephaestus odin thor loki freya ra osiris isis anubis horus shiva vishnu brahma
ganesha atlas titan hercules achilles odysseus ajax hector perseus theseus orpheus icarus
daedalus midas pandora medusa cyclops centaur minotaur phoenix griffin dragon unicorn pegasus
sphinx hydra kraken gnome goblin troll ogre fairy pixie elf dwarf giant mermaid bread butter
cheese milk cream yogurt honey sugar salt vinegar mustard ketchup mayonnaise pickle noodle pasta
spaghetti lasagna ravioli pizza burger sandwich sausage bacon ham steak roast stew soup broth
curry chili taco burrito sushi tofu omelet pancake waffle muffin bagel pretzel cracker biscuit
cookie cake pie pastry donut pudding custard jelly jam marmalade syrup caramel chocolate cocoa
coffee tea juice soda cider wine beer whiskey brandy vodka rum shirt blouse sweater jacket coat
vest suit tuxedo dress skirt trousers jeans shorts socks shoes boots sandals slippers hat cap
helmet crown scarf glove mitten belt buckle button zipper pocket collar sleeve apron cloak robe
kimono poncho turban veil ribbon necklace bracelet earring brooch wallet purse backpack suitcase
umbrella cotton wool silk linen leather velvet satin denim canvas nylon rubber plastic glass
ceramic porcelain clay brick concrete cement plaster timber plywood cardboard paper parchment
ink paint varnish glue wax tar asphalt pencil pen crayon brush easel palette notebook journal
diary ledger almanac dictionary novel poem sonnet ballad fable legend saga riddle proverb essay
letter envelope stamp postcard parcel package telegram algebra geometry calculus physics
chemistry biology botany zoology geology astronomy grammar logic ethics rhetoric circle square
triangle rectangle pentagon hexagon octagon sphere cube cone cylinder prism torus helix spiral
ellipse parabola vector matrix fraction decimal falconer archer arrow quiver sword dagger spear
lance shield armor cannon musket rifle pistol saber rapier mace trident javelin catapult chess
checkers poker domino dice puzzle kite yoyo marionette puppet doll teddy carousel trampoline
swing seesaw soccer tennis hockey rugby golf polo boxing judo karate fencing rowing cycling
surfing skating skiing archery bowling badminton volleyball basketball baseball argentina
bolivia brazil canada chile china colombia cuba denmark ecuador egypt ethiopia finland france
germany ghana greece hungary iceland india indonesia ireland israel italy jamaica japan jordan
kenya laos latvia libya malta mexico morocco nepal nigeria norway pakistan panama peru poland
portugal qatar romania russia rwanda senegal serbia singapore spain sweden syria taiwan tanzania
thailand tunisia uganda ukraine uruguay venezuela vietnam yemen zambia amazon nile danube rhine
seine thames volga ganges indus mekong yangtze euphrates tigris congo niger orinoco missouri
colorado yukon everest kilimanjaro olympus vesuvius etna fuji matterhorn sahara gobi kalahari
atacama patagonia siberia lapland bavaria tuscany provence andalusia catalonia normandy brittany
burgundy saxony bohemia moravia transylvania anatolia persia babylon sparta troy carthage aaron
abigail adrian agnes albert alfred amelia andrew angela arthur audrey barbara beatrice benjamin
bernard bianca boris brian bruno caleb camilla carlos caroline cecilia chloe christopher claire
conrad cornelia cyrus damian daniel daphne deborah dennis dominic dorothy douglas edith edgar
edmund eleanor elias elijah ellen elliot emily eric ernest esther ethan eugene evelyn ezra
florian francis frederick gabriel gavin gemma gerald gilbert gloria gordon greta gustav gwen
harold harriet harvey hazel helen herbert howard hugo ida ingrid isabel jacob james jasper
jeremy jerome joanna jonas joseph joshua julian justin katherine keith kenneth klara lara
lawrence leon leonard lewis linda logan louis lucas lucia lydia magnus malcolm marcel margaret
marina mario matilda maurice max melanie michael miles miriam monica morgan nadia nathan neil
nicholas nigel nora norman octavia otto patricia patrick percy philip phoebe ralph raymond
rebecca richard robert roderick roger roland ronald rufus rupert russell ruth sabrina sarah
sebastian selma sheila sidney silas sofia sophie spencer stanley stella stephen stuart susan
sylvia tamara theodore tobias trevor valerie vanessa vincent vivian warren wendy wilfred winston
yolanda zachary aardvark albatross alligator alpaca anteater antelope armadillo baboon barracuda
bobcat bulldog bullfrog caribou caterpillar catfish chameleon cheetah chimpanzee chinchilla
chipmunk cockatoo cormorant cougar coyote crocodile cuckoo dingo dodo dormouse earwig eel egret
elephant emu ferret firefly flamingo flounder gazelle gibbon gnat gopher grasshopper grouse
guppy hamster heifer herring hippo hyena ibex ibis impala jackal jackdaw jaguar jellyfish
kangaroo kingfisher kookaburra ladybug lamprey lemming leopard llama lynx macaw mackerel mallard
manatee marmot marten meerkat mink mongoose mosquito muskrat nightingale ocelot okapi opossum
orangutan oriole osprey oyster panther partridge pheasant piranha platypus porcupine porpoise
possum prawn puma quail raccoon reindeer rhino rooster salamander sardine scallop scorpion
seahorse skunk starfish stingray sturgeon tapir tarantula termite toucan tuna urchin wallaby
warthog weasel wildcat wolverine wombat woodpecker yak
"""
NAMES: tuple[str, ...] = tuple(_WORDS.split())

# Name to the form of it with a capital letter, which is one token too.
CAPITALISED: dict[str, str] = {name: name.capitalize() for name in NAMES[:_NUM_CAPITALISED]}
