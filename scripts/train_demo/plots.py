"""Plot schemas as data: what the story teller writes, and the grammar that the story checker reads.

A plot has roles (name:kind), beats and questions. A beat is a list of paraphrases, one of which is told; a beat whose
first entry is "?" is told three times out of five. In a paraphrase {h} is the role's word, {h.he} a pronoun of it, {a:x}
the word with its article, {x.s} its plural, [one|two] a free choice. A paraphrase may hold several sentences.
"""

PLOTS = {}


def plot(name, roles, topic, beats, ask):
    PLOTS[name] = {"roles": dict(r.split(":") for r in roles.split()), "topic": topic, "beats": beats, "ask": ask}


plot("lost thing", "h:person f:person c:adj x:thing p:place q:place t:place day:day", "a lost {x}", [
    ["{day}, {h} lost {h.his} {c} {x}.", "{day}, {h} could not find {h.his} {c} {x}.", "{h} had {a:c} {x}. {day}, it was gone."],
    ["{h.He} felt sad.", "{h.He} was worried.", "{h.He} began to cry.", "{h.He} loved that {x} very much."],
    ["{h.He} looked in the {p}, but the {x} was not there.", "First {h.he} went to the {p}, but there was no {x}."],
    ["?", "Then {h.he} looked in the {q}, but it was not there.", "Next {h.he} looked all over the {q}, but found nothing."],
    ['{f} saw {h.him} and asked, "What is wrong?"', '"Why are you sad?" asked {f}.', '"Can I help you?" asked {f}.'],
    ['"I lost my {x}," said {h}.', '"My {c} {x} is gone," {h.he} said.', '"I cannot find my {x}," {h} said.'],
    ["Together they went to the {t}.", "{f} took {h} to the {t}.", "So they looked in the {t} too."],
    ["There, under a [bench|tree|table|chair], was the {c} {x}!", "The {x} was in the {t} all along!",
     "And there was the {x}, safe and sound!"],
    ['"Thank you, {f}!" said {h}.', "{h} hugged {f} and smiled.", "{h} was happy again."],
    ["{h.He} never lost the {x} again.", "From then on {h.he} kept the {x} close.", "It is good to have a friend who helps."],
], [("What did {h} lose?", "{x}"), ("Where was the {x}?", "{t}"), ("Who helped {h}?", "{f}"), ("Where did {h} look first?", "{p}")])

plot("sharing", "h:person f:person d:food p:place day:day", "sharing {a:d}", [
    ["{day}, {h} had two {d.s}.", "{day}, {h} bought some {d.s}.", "{day}, {h} got a bag of {d.s} from {h.his} grandmother."],
    ["{h.He} sat down in the {p} to eat.", "{h.He} went to the {p} to eat them."],
    ["{f} came by and looked hungry.", "{f} was there too, but {f.he} had no food."],
    ["?", "{f.He} was sad.", "{f.He} had not eaten all day."],
    ["{h} thought about it for a moment.", "{h} did not want {f.him} to be sad.", "{h} saw that and felt sorry for {f.him}."],
    ['"Here, take this {d}," said {h}.', "{h} gave {f} {a:d}.", '"We can share," said {h}.'],
    ["{f} was so happy.", '"You are very kind," said {f}.', '"Thank you!" said {f} with a big smile.'],
    ["They ate together in the {p}.", "They sat side by side and laughed."],
    ["Sharing made them both happy.", "After that, {h} and {f} were good friends.", "A shared {d} tastes best."],
], [("What did {h} share?", "{d}"), ("Who was hungry?", "{f}"), ("Where did they eat?", "{p}"), ("Who shared with {f}?", "{h}")])

plot("rain", "h:person f:person d:food p:place q:place day:day", "a rainy picnic", [
    ["{day}, {h} and {f} went to the {p} for a picnic.", "{day}, {h} took {f} to the {p} for a picnic."],
    ["They had {a:d} and a [blanket|basket|bottle of juice].", "{f} carried {a:d} for each of them."],
    ["Soon dark clouds came.", "Then the sky turned gray.", "They had just sat down when the wind grew cold."],
    ["It began to rain hard.", "Big drops of rain fell on them."],
    ['"Run to the {q}!" said {h}.', '"We can go to the {q}," said {f}.'],
    ["They ran to the {q} and got dry.", "In the {q} it was warm and dry."],
    ["They ate the {d.s} there and told stories.", "They had the picnic in the {q} instead."],
    ["It was the best picnic ever.", "When the rain stopped, they saw a rainbow.", "The rain did not matter at all."],
], [("Where did they run?", "{q}"), ("Where did they go for a picnic?", "{p}"), ("Who went with {h}?", "{f}")])

plot("stuck animal", "h:person n:animal w:tool p:place q:place t:place s:sound day:day", "{a:n}", [
    ["{day}, {h} walked to the {p}.", "{day}, {h} was on the way to the {p}."],
    ["{h.He} heard {s}.", "There {h.he} heard {s}."],
    ["It was {a:n}, stuck in a [hole|bush|fence|ditch].", "It came from {a:n} that could not get out of a [hole|bush|fence|ditch]."],
    ['"Do not be afraid," said {h}.', "The {n} looked scared.", '"I will help you," {h} said.'],
    ["{h} ran to the {q} to get a {w}.", "{h.He} went to the {q} and found a {w}."],
    ["With the {w}, {h.he} set the {n} free.", "{h.He} used the {w} to help the {n}."],
    ["The {n} was happy and followed {h.him} to the {t}.", "The {n} went with {h.him} to the {t}."],
    ["From that day on, {h} and the {n} were friends.", "{h} named the {n} [Lucky|Sunny|Pip|Star].", "What a day!"],
], [("What was stuck?", "{n}"), ("What did {h} use?", "{w}"), ("Where did the {n} go?", "{t}"), ("Where was the {w}?", "{q}")])

plot("promise", "h:person f:person g:person c:adj x:thing p:place q:place day:day", "a promise", [
    ["{h} made a promise to {f}.", '{day}, {h} said to {f}, "I promise to help you."'],
    ["{h.He} would bring {a:c} {x} to the {p} before dark.", "{h.He} had to take {a:c} {x} to the {p}."],
    ["On the way {h.he} met {g} in the {q}.", "In the {q}, {g} was playing."],
    ['"Come and play with me," said {g}.', '"Stay here and play," {g} said.'],
    ["{h} wanted to play, but {h.he} thought of {h.his} promise.", '"I cannot. I made a promise," said {h}.'],
    ["So {h.he} went on to the {p}.", "{h.He} said goodbye and walked to the {p}."],
    ["{f} was waiting there and took the {x}.", "{h} gave the {x} to {f}."],
    ['"You kept your promise!" said {f}.', "{f} was very glad."],
    ["{h} felt proud.", "Then they all played together.", "A promise is a promise."],
], [("Who has the {x} now?", "{f}"), ("Where was {f}?", "{p}"), ("Who wanted to play?", "{g}"), ("What did {h} bring?", "{x}")])

plot("birthday", "h:person f:person g:person c:adj x:thing p:place day:day", "a birthday", [
    ["It was {h}'s birthday.", "{day}, it was {h}'s birthday."],
    ["{f} and {g} wanted to surprise {h.him}.", "{f} and {g} had a plan."],
    ["{f} bought {a:c} {x} at the shop.", "{f} made {a:c} {x} for {h.him}."],
    ["{g} hid the {x} in the {p}.", "They put the {x} in the {p}, where nobody would look."],
    ['"Let us go to the {p}," {f} said to {h}.', "Later they took {h} to the {p}."],
    ["{h} opened the door and saw the {c} {x}.", "There {h.he} found the {c} {x}."],
    ['"Happy birthday!" they said.', '"Surprise!" said {g}.'],
    ["{h} was so happy that {h.he} danced.", "It was the best birthday {h.he} ever had.", "They ate cake until it was dark."],
], [("Whose birthday was it?", "{h}"), ("Where was the {x} hidden?", "{p}"), ("What did {h} find?", "{x}")])

plot("learning", "h:person f:person k:skill p:place day:day", "learning to {k}", [
    ["{h} wanted to learn to {k}.", "{day}, {h} tried to {k}."],
    ["{h.He} went to the {p} with {f}.", "{f} said {f.he} would teach {h.him} in the {p}."],
    ["At first {h.he} could not do it.", "The first time, it went wrong."],
    ['"It is too hard," said {h}.', "{h} wanted to give up."],
    ['"Try again," said {f}.', '"You can do it," {f} said.'],
    ["{h} tried again and again.", "{h.He} practiced every day."],
    ["At last {h} could {k}!", "Then, one day, {h.he} did it!"],
    ["?", "{h.He} was proud and thanked {f}.", "{h} smiled and {f} clapped."],
    ["Never give up.", "Now {h} teaches others too.", "Practice makes it easy."],
], [("Who helped {h}?", "{f}"), ("Where did {h} learn?", "{p}")])

plot("seed", "h:person f:person e:seed p:place day:day season:season", "a {e} seed", [
    ["{day}, {h} found a {e} seed.", "In {season}, {f} gave {h} a {e} seed."],
    ["{h.He} planted it in the {p}.", "{h.He} put it in the ground near the {p}."],
    ["Every day {h.he} gave it water.", "{h.He} gave it water and sang to it."],
    ["For a long time nothing happened.", "Days went by, and the ground stayed bare."],
    ['"It will never grow," said {h}.', "{h} was not sure that it would grow."],
    ['"Wait a little," said {f}.', '"Good things take time," {f} said.'],
    ["Then a tiny green leaf came up.", "One morning there was a green leaf!"],
    ["The {e} grew tall and strong.", "Soon the {e} was taller than {h}."],
    ["{h} learned to be patient.", "{h} and {f} were very proud of it.", "Everyone in the village came to see it."],
], [("What did {h} plant?", "{e}"), ("Where did it grow?", "{p}"), ('Who said "wait"?', "{f}")])

plot("new friend", "h:person f:person p:place x:thing day:day", "a new friend", [
    ["{f} was new at school.", "{day}, {f} came to live near {h}.", "{f} did not know anybody in the {p}."],
    ["{f.He} sat alone in the {p}.", "{f.He} stood in the {p} and watched the others play."],
    ["{h} saw {f.him} there.", "{h} walked up to {f.him}."],
    ['"Do you want to play with my {x}?" asked {h}.', '"Look, I have a {x}," said {h}.'],
    ["{f} nodded.", "{f} smiled a little.", '"Yes, please," said {f}.'],
    ["They played with the {x} all afternoon.", "They took turns with the {x}."],
    ["Now {f} was not alone anymore.", "{f} had found a friend.", "The next day they met in the {p} again."],
    ["It is easy to make a friend.", "One kind word can be enough.", "They are friends to this day."],
], [("Who was new?", "{f}"), ("What did they play with?", "{x}"), ("Where did {f} sit?", "{p}"), ("Who was kind?", "{h}")])

plot("broken thing", "h:person f:person c:adj x:thing p:place day:day", "telling the truth", [
    ["{day}, {h} was playing in the {p}.", "{day}, {h} ran through the {p}."],
    ["{h.He} bumped into a shelf, and {f}'s {c} {x} fell down.", "By accident {h.he} dropped the {c} {x} that belonged to {f}."],
    ["It broke.", "It broke in two.", "Crash! It was broken."],
    ["{h} was scared.", "{h} wanted to hide.", "Nobody had seen it."],
    ["But {h.he} knew that it was right to tell the truth.", "{h.He} thought about it and went to {f}."],
    ['"I broke your {x}. I am sorry," said {h}.', '"I am so sorry about the {x}," {h.he} said.'],
    ["{f} was sad at first.", "{f} was quiet for a moment.", "{f} looked at the {x}."],
    ['"Thank you for telling me," said {f}.', '"It was an accident," {f} said.'],
    ["They fixed it together with glue.", "Together they made it whole again."],
    ["{h} felt much better.", "After that, {h} was more careful.", "The truth is always best."],
], [("Who broke the {x}?", "{h}"), ("Whose {x} was it?", "{f}"), ("Where was {h}?", "{p}")])

plot("scary noise", "h:person f:person n:animal p:place s:sound", "a strange noise", [
    ["It was night, and {h} could not sleep.", "Late at night, {h} woke up.", "{h} was alone in bed when it was dark."],
    ["{h.He} heard {s} from the {p}.", "There was {s} in the {p}."],
    ["{h.He} was very scared.", "{h.His} heart beat fast."],
    ["{h.He} woke {f}.", "{h.He} called {f}.", "{h.He} ran to {f}."],
    ['"Let us look together," said {f}.', '"I will come with you," said {f}.'],
    ["They took a lamp and went to the {p}.", "Slowly they walked to the {p}."],
    ["It was only {a:n}!", "There sat {a:n} and looked at them!"],
    ["They both laughed.", "{h} laughed so much that {h.he} forgot to be afraid."],
    ["After that, {h} slept well.", "Now {h.he} knows that the dark is not so bad.", "The {n} got some milk and went away."],
], [("What made the noise?", "{n}"), ("Who came along?", "{f}"), ("Where was the noise?", "{p}")])

plot("race", "h:person f:person p:place q:place day:day", "a race", [
    ["{day}, there was a race from the {p} to the {q}.", "{day}, {h} and {f} ran a race from the {p} to the {q}."],
    ["{h} was the fastest of all.", "{h} was sure that {h.he} would win.", "{h} ran as fast as the wind."],
    ["Halfway, {f} fell and hurt {f.his} knee.", "Then {f} tripped over a stone."],
    ['"Ouch!" cried {f}.', "{f} could not get up."],
    ["{h} stopped and went back.", "{h} turned around to help."],
    ['"Take my hand," said {h}.', "{h} helped {f} to stand."],
    ["They walked to the {q} side by side.", "Arm in arm they came to the {q}."],
    ["They were the last, but everyone clapped.", "Nobody asked who had won."],
    ["A friend is better than a prize.", "{f} never forgot it.", "{h} was happier than any winner."],
], [("Who fell?", "{f}"), ("Who helped?", "{h}"), ("Where did the race end?", "{q}"), ("Where did the race start?", "{p}")])

plot("big cake", "h:person f:person g:person d:food p:place day:day", "a big {d}", [
    ["{day}, {h} wanted to make a very big {d}.", "{day}, {h} found a huge {d} in the {p}."],
    ["But it was too heavy for {h.him}.", "But {h.he} could not lift it alone."],
    ["{h} asked {f} for help.", "{f} came to help {h}."],
    ["They pulled and pulled, but it did not move.", "Even together they could not do it."],
    ["Then {g} came along.", "Then they saw {g} in the {p}."],
    ['"Three are stronger than two," said {g}.', '"Let me help too," said {g}.'],
    ["One, two, three, and up it went!", "All three lifted at once, and it worked!"],
    ["They carried the {d} to the {p}.", "They put it on a table in the {p}."],
    ["There was enough {d} for everyone.", "They ate until they were full.", "Together you can do more than alone."],
], [("Who came last?", "{g}"), ("What was so big?", "{d}"), ("Who helped {h} first?", "{f}")])

plot("letter", "h:person f:person p:place q:place x:thing day:day", "a letter", [
    ["{day}, {h} got a letter.", "{day}, there was a letter for {h}."],
    ["It was from {f}, who lived far away.", "{f} had written it."],
    ['"Come to the {p}," it said.', 'The letter said, "I left something for you in the {p}."'],
    ["{h} ran to the {p} at once.", "{h} put on {h.his} shoes and went to the {p}."],
    ["There {h.he} found a note: look in the {q}.", "But there was only a note that said: go to the {q}."],
    ["So {h.he} went on to the {q}.", "{h} laughed and walked to the {q}."],
    ["In the {q} there was a box with a {x} in it.", "Behind a door in the {q} lay a {x}."],
    ["And there was {f}, too!", "Then {f} jumped out from behind a wall."],
    ['"I missed you," said {f}.', '"I came to visit you," {f} said.'],
    ["It was a wonderful surprise.", "They talked until the stars came out."],
], [("Who wrote the letter?", "{f}"), ("What was in the {q}?", "{x}"), ("Where did {h} go first?", "{p}")])

plot("snow", "h:person f:person x:thing p:place", "a snowman", [
    ["In winter, snow fell on the {p}.", "One morning the {p} was white with snow."],
    ["{h} and {f} ran outside.", "{h} called {f} and they went out to play."],
    ["They made a big snowman.", "They rolled three big balls of snow."],
    ["{h} gave it a carrot for a nose.", "{f} used two stones for the eyes."],
    ["{f} put a {x} on top.", "{h} gave it {h.his} {x}."],
    ['"He looks like a king," said {f}.', '"Now he needs a name," said {h}.'],
    ["They called it [Mister Cold|Old Frost|Big Joe|Snowy].", "They danced around it."],
    ["In spring the snowman was gone.", "After a week the sun came back and the snowman melted."],
    ["Only the {x} was left.", "In the wet grass lay the {x}."],
    ['"He will come back next year," said {h}.', "They could hardly wait for the next winter."],
], [("What did they make?", "snowman"), ("What was left?", "{x}"), ("Who was with {h}?", "{f}"), ("Where was the snow?", "{p}")])

plot("lost child", "h:person f:person n:animal p:place q:place day:day", "being lost", [
    ["{day}, {h} went to the {p} with {f}.", "{day}, {f} and {h} walked through the {p}."],
    ["{h} saw {a:n} and ran after it.", "{a:n} ran by, and {h} followed it."],
    ["Soon {h.he} did not know where {h.he} was.", "When {h.he} looked up, {f} was gone."],
    ['"Where am I?" thought {h}.', "{h} felt very small."],
    ["{h.He} sat down and waited.", "{h.He} stayed where {h.he} was, as {f} had told {h.him}."],
    ["{f} looked everywhere and called {h.his} name.", "{f} looked for {h.him} in the {q}."],
    ["At last {f} saw {h.him}.", "Then {h} heard {f} and called back."],
    ['"There you are!" said {f}.', "{f} held {h.him} tight."],
    ['"I will stay close to you," said {h}.', "They went home hand in hand.", "Next time {h} will not run away."],
], [("Who was lost?", "{h}"), ("What did {h} follow?", "{n}"), ("Who found {h}?", "{f}"), ("Where did they walk?", "{p}")])

plot("band", "h:person f:person g:person p:place day:day", "a band", [
    ["{day}, {h} had an idea.", "{h} was bored. {day}, {h.he} had an idea."],
    ['"Let us make a band," said {h}.', '"We could make music," {h.he} said.'],
    ["{h} played the drum.", "{h} took two spoons and a pot."],
    ["{f} played the flute.", "{f} sang."],
    ["{g} had a bell.", "{g} clapped the beat."],
    ["At first it was only noise.", "At first nobody played the same song."],
    ["But they played in the {p} every day.", "They met in the {p} and tried again."],
    ["In the end it sounded good.", "Soon people stopped to listen."],
    ["They gave a concert in the {p}.", "The whole village danced.", "Even the birds seemed to listen."],
    ["{h}, {f} and {g} bowed.", "It was a happy day for {h}, {f} and {g}."],
], [("Who had the idea?", "{h}"), ("Where did they play?", "{p}")])

plot("river", "h:person f:person n:animal w:tool p:place day:day", "a river", [
    ["{day}, {h} and {f} came to a river.", "{day}, there was a river between {h} and the {p}."],
    ["The bridge was gone.", "There was no bridge.", "The water was deep and cold."],
    ['"How can we get to the {p}?" asked {f}.', '"We have to get across," said {h}.'],
    ["They sat down to think.", "They walked up and down and thought."],
    ["Then {a:n} showed them a place with flat stones.", "They saw {a:n} jump from stone to stone."],
    ['"We can do that too," said {h}.', '"Look, that is the way!" said {f}.'],
    ["{h} held the {w}, and {f} went first.", "With a {w} to hold on to, they went across."],
    ["They came to the {p} with dry feet.", "Soon they stood in the {p}, safe and dry."],
    ["They thanked the {n}.", "It pays to look around.", "On the way home they took the same stones."],
], [("What showed the way?", "{n}"), ("Where did they want to go?", "{p}"), ("What did they hold?", "{w}")])

plot("moon", "h:person f:person p:place", "the moon", [
    ["One night, {h} looked at the moon.", "{h} loved the moon."],
    ['"I want to touch it," {h.he} said.', "{h.He} wanted to have it for {h.himself}."],
    ["{h.He} climbed the highest roof in the {p}.", "{h.He} took a ladder to the {p}."],
    ["But the moon was still far away.", "The moon did not come any closer."],
    ["{f} saw {h.him} and laughed.", '"What are you doing?" asked {f}.'],
    ['"Come down, I will show you something," said {f}.', "{f} filled a bowl with water and put it on the ground."],
    ["In the water {h} saw the moon, round and bright.", "And there was the moon, right in front of {h.him}!"],
    ["{h} put one finger in the water, and the moon danced.", "{h.He} touched it, very gently."],
    ["{h} slept with a smile that night.", "Some things you can only look at.", '"Good night, moon," said {h}.'],
], [("Who laughed?", "{f}"), ("Where did {h} climb?", "{p}"), ("What did {h} want?", "moon")])

plot("greedy", "h:person f:person n:animal d:food p:place day:day", "a greedy {n}", [
    ["Once there was {a:n} who loved to eat.", "In the {p} there lived a greedy {n}."],
    ["{day}, it found a basket of {d.s}.", "{day}, {h} left a basket of {d.s} in the {p}."],
    ["The {n} ate one {d}, and then one more.", "It ate and ate and did not stop."],
    ["Soon the basket was empty.", "In the end there was not one {d} left."],
    ['"My belly hurts," said the {n}.', "The {n} could not move anymore."],
    ["{h} came back and saw it.", "When {h} came, the {n} lay on its back."],
    ["{h.He} was not angry.", "{h.He} had to laugh."],
    ['"Next time, leave some for me," said {h}.', "{h.He} stayed with the {n} until it felt better."],
    ["After that, the {n} ate only one {d} a day.", "Enough is better than too much."],
], [("What did the {n} eat?", "{d}"), ("Who came back?", "{h}"), ("What loved to eat?", "{n}")])

plot("trade", "h:person f:person g:person x:thing y:thing z:thing day:day", "trading", [
    ["{day}, {h} had a {x}.", "{h} owned nothing but a {x}."],
    ["But {h.he} really wanted a {z}.", "{h.His} dream was to have a {z}."],
    ["{f} had a {y} and liked the {x}.", "{f} wanted the {x} and had a {y}."],
    ["So {h} gave {f} the {x} and got the {y}.", "They traded the {x} for the {y}."],
    ["Then {h.he} met {g}, who had a {z}.", "Later {h.he} saw {g} with a {z}."],
    ['"I need a {y}," said {g}.', "{g} looked at the {y} and smiled."],
    ["{h} gave {g} the {y} and got the {z}.", "So {g} took the {y} and {h} took the {z}."],
    ["In the end everyone was happy.", "Now each of them had what they wanted."],
], [("Who has the {x} now?", "{f}"), ("Who has the {y} now?", "{g}"), ("Who has the {z} now?", "{h}"), ("What did {h} want?", "{z}")])

plot("helping at home", "h:person f:person p:place q:place x:thing day:day", "helping", [
    ["{day}, {f} was ill in bed.", "{day}, {f} had a cold and could not get up."],
    ["{h} wanted to help {f.him}.", '"I will do your work today," said {h}.'],
    ["First {h.he} cleaned the {p}.", "In the morning {h.he} swept the {p}."],
    ["Then {h.he} got the {x} from the {q}.", "After that {h.he} went to the {q} to get the {x}."],
    ["{h.He} made soup, too.", "{h.He} cooked some soup for {f}."],
    ["The soup was a little too salty.", "{h.He} put in too much salt, but {f} did not mind."],
    ['"You are a good helper," said {f}.', "{f} drank it and felt better."],
    ["Two days later {f} was well again.", "The next day {f} could get up."],
    ["{h} was tired, but happy.", "To help is a fine thing.", "Then they went for a walk together."],
], [("Who was ill?", "{f}"), ("What did {h} clean?", "{p}"), ("Where was the {x}?", "{q}"), ("Who made soup?", "{h}")])

plot("treasure", "h:person f:person p:place q:place x:thing c:adj day:day", "a treasure", [
    ["{day}, {h} found an old map in the {p}.", "{day}, an old map fell out of a book in the {p}."],
    ["It showed the way to a treasure.", "There was a red cross on it."],
    ["{h} showed it to {f}.", "{h} ran to {f} with the map."],
    ['"The cross is in the {q}!" said {f}.', '"That looks like the {q}," {f} said.'],
    ["They went there with a shovel.", "They took a shovel and set off."],
    ["They dug a deep hole.", "They dug for an hour."],
    ["At last they hit something hard.", "Then the shovel hit a wooden box."],
    ["In the box there was {a:c} {x}.", "They opened the box and found {a:c} {x}."],
    ["It was not gold, but they loved it.", "They kept it in turns.", "The best part was to look for it together."],
], [("What did they find?", "{x}"), ("Where was the map?", "{p}"), ("Where was the treasure?", "{q}"), ("Who helped {h}?", "{f}")])

plot("too small", "h:person f:person n:animal p:place x:thing day:day", "being small", [
    ["{h} was the smallest child of all.", "{h} was very small."],
    ['"You are too small," the others always said.', "The big children never let {h.him} play."],
    ["{day}, {f} dropped a {x} into a deep crack in the {p}.", "{day}, {f}'s {x} rolled under the floor of the {p}."],
    ["Nobody could reach it.", "All of them tried, but their arms were too big."],
    ['"Let me try," said {h}.', "Then {h} came."],
    ["{h.He} put in {h.his} thin arm and got it out.", "{h.He} was small enough to crawl in and get it."],
    ['"Hooray for {h}!" they shouted.', '"You did it!" said {f}.'],
    ["From that day {h} could always play with them.", "Nobody called {h.him} too small again.", "It can be good to be small."],
], [("Who was small?", "{h}"), ("What did {h} get out?", "{x}"), ("Whose {x} was it?", "{f}"), ("Where was the {x}?", "{p}")])
